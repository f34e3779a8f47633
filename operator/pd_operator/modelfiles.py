"""PURE. How a model gets into a worker's pod: mounted, converted, copied or fetched."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from pd_operator import podparts
from pd_operator.api import (
    Builtin,
    Claim,
    HostPath,
    HuggingFace,
    ModelImage,
    Source,
    Template,
)
from pd_operator.podparts import Manifest, Settings

MODELS_DIR = "/models"
SOURCE_DIR = "/source"
COPY_DIR = "/copy"
MODELS_VOLUME = "models"


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the engine finds the model, and what brings it there."""

    path: str
    init_containers: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()


_MODELS: Manifest = {"name": MODELS_VOLUME, "emptyDir": {}}
_MODELS_MOUNT: Manifest = {"name": MODELS_VOLUME, "mountPath": MODELS_DIR}


def model_files(source: Source, image: str, template: Template, settings: Settings) -> ModelFiles:
    """`image` is the engine's: it knows how to convert."""
    match source:
        case Builtin(name):
            args = [f"--source=builtin:{name}"]
            return _made(name, args, image, template, settings)
        case HostPath(path) if path.lower().endswith(".gguf"):
            return _gguf(PurePosixPath(path), image, template, settings)
        case HostPath(path):
            return _mounted({"hostPath": {"path": path, "type": "Directory"}})
        case Claim(claim, path):
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            return _mounted(volume, path)
        case HuggingFace(repo, revision, secret):
            args = [f"--source=huggingface:{repo}" + (f"@{revision}" if revision else "")]
            token = [podparts.secret_env("HF_TOKEN", secret, "token")] if secret else []
            return _made(repo.replace("/", "--"), args, image, template, settings, env=token)
        case ModelImage(model_image):
            return _copied(model_image)


def _mounted(volume: Manifest, folder: str = "") -> ModelFiles:
    """A folder in Hugging Face format that needs no preparation."""
    path = f"{SOURCE_DIR}/{folder}" if folder else SOURCE_DIR
    mount = {"name": "source", "mountPath": SOURCE_DIR, "readOnly": True}
    return ModelFiles(path, volumes=({"name": "source", **volume},), mounts=(mount,))


def _gguf(file: PurePosixPath, image: str, template: Template, settings: Settings) -> ModelFiles:
    """Two files of one name in different folders get folders of their own."""
    mounted_at = f"{SOURCE_DIR}/{file.name}"
    mount = {"name": "source", "mountPath": mounted_at, "readOnly": True}
    folder = f"{file.stem}-{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    args = [f"--source={mounted_at}"]
    made = _made(folder, args, image, template, settings, mounts=[mount])
    volume = {"name": "source", "hostPath": {"path": str(file), "type": "File"}}
    return ModelFiles(made.path, made.init_containers, (*made.volumes, volume), made.mounts)


def _made(
    folder: str,
    args: Sequence[str],
    image: str,
    template: Template,
    settings: Settings,
    *,
    env: Sequence[Manifest] = (),
    mounts: Sequence[Manifest] = (),
) -> ModelFiles:
    """A model that an init container converts or fetches into the models' volume.

    It runs the engine's image, so what the user mounts into that one, or sets there (a
    proxy, say), is for it as well.
    """
    path = f"{MODELS_DIR}/{folder}"
    fields = {
        "command": list(settings.convert_command),
        "args": [*args, f"--out={path}"],
        "env": [*podparts.env({"TOKENIZERS_PARALLELISM": "false"}, template), *env],
        "volumeMounts": [
            *podparts.SCRATCH_MOUNTS,
            _MODELS_MOUNT,
            *mounts,
            *podparts.own_mounts(template),
        ],
    }
    container = podparts.container("model", image, template, fields)
    return ModelFiles(path, (container,), (_MODELS,), (_MODELS_MOUNT,))


def _copied(image: str) -> ModelFiles:
    """An image that holds the model in its /models folder."""
    fields = {
        "command": ["cp", "-r"],
        "args": [f"{MODELS_DIR}/.", COPY_DIR],
        "volumeMounts": [{"name": MODELS_VOLUME, "mountPath": COPY_DIR}],
    }
    container = podparts.container("model", image, Template(), fields)
    return ModelFiles(MODELS_DIR, (container,), (_MODELS,), (_MODELS_MOUNT,))
