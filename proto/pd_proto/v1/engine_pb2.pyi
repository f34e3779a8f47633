from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
    ROLE_BOTH: _ClassVar[Role]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_UNSPECIFIED: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role
ROLE_BOTH: Role
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
FINISH_UNSPECIFIED: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish

class WorkerReport(_message.Message):
    __slots__ = ("hello", "heartbeat", "bundle")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    bundle: TokenizerBundle
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., bundle: _Optional[_Union[TokenizerBundle, _Mapping]] = ...) -> None: ...

class RouterNotice(_message.Message):
    __slots__ = ("welcome", "want_bundle", "refusal")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    WANT_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    want_bundle: WantBundle
    refusal: Refusal
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., want_bundle: _Optional[_Union[WantBundle, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class KvFormat(_message.Message):
    __slots__ = ("dtype", "quantization", "block_tokens", "layers", "kv_heads", "head_dim", "block_bytes", "protocol_version")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    quantization: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    block_bytes: int
    protocol_version: int
    def __init__(self, dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., block_tokens: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_bytes: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Capacity(_message.Message):
    __slots__ = ("kv_blocks", "max_model_tokens", "max_running", "max_queued")
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_FIELD_NUMBER: _ClassVar[int]
    kv_blocks: int
    max_model_tokens: int
    max_running: int
    max_queued: int
    def __init__(self, kv_blocks: _Optional[int] = ..., max_model_tokens: _Optional[int] = ..., max_running: _Optional[int] = ..., max_queued: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("worker", "epoch", "role", "work_address", "kv_address", "transports", "model", "model_hash", "kv_format", "layout_hash", "capacity", "bundle_hash", "revision", "prefill_tokens_per_s", "product", "shares_prefixes", "proof")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORK_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_HASH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PRODUCT_FIELD_NUMBER: _ClassVar[int]
    SHARES_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: str
    role: Role
    work_address: str
    kv_address: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    model: str
    model_hash: str
    kv_format: KvFormat
    layout_hash: str
    capacity: Capacity
    bundle_hash: str
    revision: str
    prefill_tokens_per_s: float
    product: str
    shares_prefixes: bool
    proof: bytes
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., work_address: _Optional[str] = ..., kv_address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., model_hash: _Optional[str] = ..., kv_format: _Optional[_Union[KvFormat, _Mapping]] = ..., layout_hash: _Optional[str] = ..., capacity: _Optional[_Union[Capacity, _Mapping]] = ..., bundle_hash: _Optional[str] = ..., revision: _Optional[str] = ..., prefill_tokens_per_s: _Optional[float] = ..., product: _Optional[str] = ..., shares_prefixes: _Optional[bool] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("router", "router_epoch", "heartbeat_s", "lapse_s", "control_ports", "confirmation")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LAPSE_S_FIELD_NUMBER: _ClassVar[int]
    CONTROL_PORTS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    router: str
    router_epoch: str
    heartbeat_s: float
    lapse_s: float
    control_ports: _containers.RepeatedScalarFieldContainer[int]
    confirmation: bytes
    def __init__(self, router: _Optional[str] = ..., router_epoch: _Optional[str] = ..., heartbeat_s: _Optional[float] = ..., lapse_s: _Optional[float] = ..., control_ports: _Optional[_Iterable[int]] = ..., confirmation: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class WantBundle(_message.Message):
    __slots__ = ("bundle_hash",)
    BUNDLE_HASH_FIELD_NUMBER: _ClassVar[int]
    bundle_hash: str
    def __init__(self, bundle_hash: _Optional[str] = ...) -> None: ...

class TokenizerBundle(_message.Message):
    __slots__ = ("bundle_hash", "tokenizer_json", "chat_template", "special_tokens", "eos_token_ids", "add_bos", "vocab_size")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    BUNDLE_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADD_BOS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    bundle_hash: str
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    add_bos: bool
    vocab_size: int
    def __init__(self, bundle_hash: _Optional[str] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., add_bos: _Optional[bool] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued", "running", "waiting_grants", "pending_tokens", "kv_blocks", "kv_free", "kv_cached", "kv_active", "kv_granted", "kv_quarantined", "step_s", "steps", "busy_s", "computed_tokens", "computed_pairs", "pending_pairs")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_GRANTS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_FREE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    KV_GRANTED_FIELD_NUMBER: _ClassVar[int]
    KV_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_PAIRS_FIELD_NUMBER: _ClassVar[int]
    PENDING_PAIRS_FIELD_NUMBER: _ClassVar[int]
    queued: int
    running: int
    waiting_grants: int
    pending_tokens: int
    kv_blocks: int
    kv_free: int
    kv_cached: int
    kv_active: int
    kv_granted: int
    kv_quarantined: int
    step_s: float
    steps: int
    busy_s: float
    computed_tokens: int
    computed_pairs: int
    pending_pairs: int
    def __init__(self, queued: _Optional[int] = ..., running: _Optional[int] = ..., waiting_grants: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., kv_blocks: _Optional[int] = ..., kv_free: _Optional[int] = ..., kv_cached: _Optional[int] = ..., kv_active: _Optional[int] = ..., kv_granted: _Optional[int] = ..., kv_quarantined: _Optional[int] = ..., step_s: _Optional[float] = ..., steps: _Optional[int] = ..., busy_s: _Optional[float] = ..., computed_tokens: _Optional[int] = ..., computed_pairs: _Optional[int] = ..., pending_pairs: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("seq", "state", "load", "prefix_gained", "prefix_lost", "prefix_reset", "routers", "altered")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PREFIX_GAINED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOST_FIELD_NUMBER: _ClassVar[int]
    PREFIX_RESET_FIELD_NUMBER: _ClassVar[int]
    ROUTERS_FIELD_NUMBER: _ClassVar[int]
    ALTERED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    state: WorkerState
    load: Load
    prefix_gained: _containers.RepeatedScalarFieldContainer[bytes]
    prefix_lost: _containers.RepeatedScalarFieldContainer[bytes]
    prefix_reset: bool
    routers: int
    altered: bool
    def __init__(self, seq: _Optional[int] = ..., state: _Optional[_Union[WorkerState, str]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., prefix_gained: _Optional[_Iterable[bytes]] = ..., prefix_lost: _Optional[_Iterable[bytes]] = ..., prefix_reset: _Optional[bool] = ..., routers: _Optional[int] = ..., altered: _Optional[bool] = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("bind", "generate", "prefill", "cancel", "renew", "pull", "share")
    BIND_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    PULL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    bind: Bind
    generate: Generate
    prefill: Prefill
    cancel: Cancel
    renew: Renew
    pull: Pull
    share: Share
    def __init__(self, bind: _Optional[_Union[Bind, _Mapping]] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., pull: _Optional[_Union[Pull, _Mapping]] = ..., share: _Optional[_Union[Share, _Mapping]] = ...) -> None: ...

class Bind(_message.Message):
    __slots__ = ("router", "router_epoch", "worker_epoch", "proof")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    router: str
    router_epoch: str
    worker_epoch: str
    proof: bytes
    def __init__(self, router: _Optional[str] = ..., router_epoch: _Optional[str] = ..., worker_epoch: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class TransferId(_message.Message):
    __slots__ = ("request", "attempt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request: str
    attempt: int
    def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "top_logprobs", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    logprobs: bool
    top_logprobs: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    grammar: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., grammar: _Optional[str] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("handle", "id", "token_ids", "prompt_tokens", "choices", "sampling", "deadline_s", "grant_wait_s", "priority", "cache_salt", "prefill_here", "tpot_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    GRANT_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_HERE_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    id: TransferId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    deadline_s: float
    grant_wait_s: float
    priority: int
    cache_salt: bytes
    prefill_here: bool
    tpot_s: float
    def __init__(self, handle: _Optional[int] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., deadline_s: _Optional[float] = ..., grant_wait_s: _Optional[float] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., prefill_here: _Optional[bool] = ..., tpot_s: _Optional[float] = ...) -> None: ...

class KvTarget(_message.Message):
    __slots__ = ("worker", "epoch", "kv_address", "layout_hash", "transport", "grant", "prefix_tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    epoch: str
    kv_address: str
    layout_hash: str
    transport: str
    grant: bytes
    prefix_tokens: int
    def __init__(self, worker: _Optional[str] = ..., epoch: _Optional[str] = ..., kv_address: _Optional[str] = ..., layout_hash: _Optional[str] = ..., transport: _Optional[str] = ..., grant: _Optional[bytes] = ..., prefix_tokens: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("handle", "id", "token_ids", "prompt_tokens", "choices", "sampling", "deadline_s", "priority", "cache_salt", "target", "lease_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    id: TransferId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    deadline_s: float
    priority: int
    cache_salt: bytes
    target: KvTarget
    lease_s: float
    def __init__(self, handle: _Optional[int] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., deadline_s: _Optional[float] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., target: _Optional[_Union[KvTarget, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Pull(_message.Message):
    __slots__ = ("handle", "id", "hashes")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    handle: int
    id: TransferId
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, handle: _Optional[int] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("handle", "id", "hashes", "target", "lease_s")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    handle: int
    id: TransferId
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    target: KvTarget
    lease_s: float
    def __init__(self, handle: _Optional[int] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., hashes: _Optional[_Iterable[bytes]] = ..., target: _Optional[_Union[KvTarget, _Mapping]] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("handles",)
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handles: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkReply(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("bound", "granted", "prefilled", "committed", "tokens", "failed")
    BOUND_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    bound: Bound
    granted: Granted
    prefilled: Prefilled
    committed: Committed
    tokens: Tokens
    failed: Failed
    def __init__(self, bound: _Optional[_Union[Bound, _Mapping]] = ..., granted: _Optional[_Union[Granted, _Mapping]] = ..., prefilled: _Optional[_Union[Prefilled, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ...) -> None: ...

class Bound(_message.Message):
    __slots__ = ("worker_epoch", "confirmation")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONFIRMATION_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: str
    confirmation: bytes
    def __init__(self, worker_epoch: _Optional[str] = ..., confirmation: _Optional[bytes] = ...) -> None: ...

class Granted(_message.Message):
    __slots__ = ("handle", "grant", "prefix_tokens", "ttl_s", "wait_s", "kv_address")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    grant: bytes
    prefix_tokens: int
    ttl_s: float
    wait_s: float
    kv_address: str
    def __init__(self, handle: _Optional[int] = ..., grant: _Optional[bytes] = ..., prefix_tokens: _Optional[int] = ..., ttl_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., kv_address: _Optional[str] = ...) -> None: ...

class Prefilled(_message.Message):
    __slots__ = ("handle", "first", "cached_tokens", "queue_s", "prefill_s", "kv_bytes", "transfer_s", "transport")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first: _containers.RepeatedCompositeFieldContainer[TokenOut]
    cached_tokens: int
    queue_s: float
    prefill_s: float
    kv_bytes: int
    transfer_s: float
    transport: str
    def __init__(self, handle: _Optional[int] = ..., first: _Optional[_Iterable[_Union[TokenOut, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., transport: _Optional[str] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("handle", "first", "kv_bytes", "transfer_s", "exposed_s", "cached_tokens", "transport")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    handle: int
    first: _containers.RepeatedCompositeFieldContainer[TokenOut]
    kv_bytes: int
    transfer_s: float
    exposed_s: float
    cached_tokens: int
    transport: str
    def __init__(self, handle: _Optional[int] = ..., first: _Optional[_Iterable[_Union[TokenOut, _Mapping]]] = ..., kv_bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token", "logprob")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprob: float
    def __init__(self, token: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenOut(_message.Message):
    __slots__ = ("handle", "choice", "index", "token", "finish", "logprob", "top")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    handle: int
    choice: int
    index: int
    token: int
    finish: Finish
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    def __init__(self, handle: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenOut]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenOut, _Mapping]]] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("handle", "kind", "message")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    kind: str
    message: str
    def __init__(self, handle: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class KvFrame(_message.Message):
    __slots__ = ("hello", "push", "seal", "abort")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    hello: KvHello
    push: KvPush
    seal: KvSeal
    abort: KvAbort
    def __init__(self, hello: _Optional[_Union[KvHello, _Mapping]] = ..., push: _Optional[_Union[KvPush, _Mapping]] = ..., seal: _Optional[_Union[KvSeal, _Mapping]] = ..., abort: _Optional[_Union[KvAbort, _Mapping]] = ...) -> None: ...

class KvReply(_message.Message):
    __slots__ = ("welcome", "refusal", "verdict")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    welcome: KvWelcome
    refusal: KvRefusal
    verdict: KvVerdict
    def __init__(self, welcome: _Optional[_Union[KvWelcome, _Mapping]] = ..., refusal: _Optional[_Union[KvRefusal, _Mapping]] = ..., verdict: _Optional[_Union[KvVerdict, _Mapping]] = ...) -> None: ...

class KvHello(_message.Message):
    __slots__ = ("protocol_version", "worker", "epoch", "target_epoch", "model_hash", "kv_format", "layout_hash", "transport", "region")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TARGET_EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_HASH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker: str
    epoch: str
    target_epoch: str
    model_hash: str
    kv_format: KvFormat
    layout_hash: str
    transport: str
    region: KvRegion
    def __init__(self, protocol_version: _Optional[int] = ..., worker: _Optional[str] = ..., epoch: _Optional[str] = ..., target_epoch: _Optional[str] = ..., model_hash: _Optional[str] = ..., kv_format: _Optional[_Union[KvFormat, _Mapping]] = ..., layout_hash: _Optional[str] = ..., transport: _Optional[str] = ..., region: _Optional[_Union[KvRegion, _Mapping]] = ...) -> None: ...

class KvRegion(_message.Message):
    __slots__ = ("agent", "address", "size")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    agent: bytes
    address: int
    size: int
    def __init__(self, agent: _Optional[bytes] = ..., address: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class KvWelcome(_message.Message):
    __slots__ = ("epoch", "transport")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    transport: str
    def __init__(self, epoch: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class KvRefusal(_message.Message):
    __slots__ = ("reason", "kind")
    REASON_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    reason: str
    kind: str
    def __init__(self, reason: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class KvPush(_message.Message):
    __slots__ = ("grant", "id", "layer_start", "layer_count", "block_start", "block_count", "payload_bytes", "checksum", "quantization", "source_blocks")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_START_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_START_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    id: TransferId
    layer_start: int
    layer_count: int
    block_start: int
    block_count: int
    payload_bytes: int
    checksum: int
    quantization: str
    source_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, grant: _Optional[bytes] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., layer_start: _Optional[int] = ..., layer_count: _Optional[int] = ..., block_start: _Optional[int] = ..., block_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., quantization: _Optional[str] = ..., source_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class KvSeal(_message.Message):
    __slots__ = ("grant", "id", "token_count", "payload_bytes", "coverage", "first", "cached_tokens")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    id: TransferId
    token_count: int
    payload_bytes: int
    coverage: int
    first: _containers.RepeatedCompositeFieldContainer[TokenOut]
    cached_tokens: int
    def __init__(self, grant: _Optional[bytes] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., token_count: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., coverage: _Optional[int] = ..., first: _Optional[_Iterable[_Union[TokenOut, _Mapping]]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class KvAbort(_message.Message):
    __slots__ = ("grant", "id", "reason")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    id: TransferId
    reason: str
    def __init__(self, grant: _Optional[bytes] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class KvVerdict(_message.Message):
    __slots__ = ("grant", "id", "committed", "reason")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    grant: bytes
    id: TransferId
    committed: bool
    reason: str
    def __init__(self, grant: _Optional[bytes] = ..., id: _Optional[_Union[TransferId, _Mapping]] = ..., committed: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
