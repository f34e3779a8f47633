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

IMAGE_DIR = "/models"
"""Where an image that holds a model has it."""
COPY_DIR = "/copy"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model of a pod lies. `name`: of the container that brings it; then the volumes
    for what is made there and for what the user has, and where they are mounted."""

    name: str
    models_volume: str
    models_dir: str
    source_volume: str
    source_dir: str

    @property
    def models(self) -> Manifest:
        return {"name": self.models_volume, "emptyDir": {}}

    @property
    def models_mount(self) -> Manifest:
        return {"name": self.models_volume, "mountPath": self.models_dir}

    def source_mount(self, at: str) -> Manifest:
        return {"name": self.source_volume, "mountPath": at, "readOnly": True}


MODEL = Place("model", "models", "/models", "source", "/source")
DRAFT_MODEL = Place("draft-model", "draft-models", "/draft-models", "draft-source", "/draft-source")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where the engine finds the model, and what brings it there."""

    path: str
    init_containers: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()


def model_files(
    source: Source, image: str, template: Template, settings: Settings, place: Place = MODEL
) -> ModelFiles:
    """`image` is the engine's: it knows how to convert."""
    match source:
        case Builtin(name):
            args = [f"--source=builtin:{name}"]
            return _made(name, args, image, template, settings, place)
        case HostPath(path) if path.lower().endswith(".gguf"):
            return _gguf(PurePosixPath(path), image, template, settings, place)
        case HostPath(path):
            return _mounted({"hostPath": {"path": path, "type": "Directory"}}, place)
        case Claim(claim, path):
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            return _mounted(volume, place, path)
        case HuggingFace(repo, revision, secret):
            args = [f"--source=huggingface:{repo}" + (f"@{revision}" if revision else "")]
            token = [podparts.secret_env("HF_TOKEN", secret, "token")] if secret else []
            return _made(repo.replace("/", "--"), args, image, template, settings, place, env=token)
        case ModelImage(model_image):
            return _copied(model_image, place)


def _mounted(volume: Manifest, place: Place, folder: str = "") -> ModelFiles:
    """A folder in Hugging Face format that needs no preparation."""
    path = f"{place.source_dir}/{folder}" if folder else place.source_dir
    volumes = ({"name": place.source_volume, **volume},)
    return ModelFiles(path, volumes=volumes, mounts=(place.source_mount(place.source_dir),))


def _gguf(
    file: PurePosixPath, image: str, template: Template, settings: Settings, place: Place
) -> ModelFiles:
    """Two files of one name in different folders get folders of their own."""
    mounted_at = f"{place.source_dir}/{file.name}"
    folder = f"{file.stem}-{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    args = [f"--source={mounted_at}"]
    mounts = [place.source_mount(mounted_at)]
    made = _made(folder, args, image, template, settings, place, mounts=mounts)
    volume = {"name": place.source_volume, "hostPath": {"path": str(file), "type": "File"}}
    return ModelFiles(made.path, made.init_containers, (*made.volumes, volume), made.mounts)


def _made(
    folder: str,
    args: Sequence[str],
    image: str,
    template: Template,
    settings: Settings,
    place: Place,
    *,
    env: Sequence[Manifest] = (),
    mounts: Sequence[Manifest] = (),
) -> ModelFiles:
    """A model that an init container converts or fetches into the models' volume.

    It runs the engine's image, so what the user mounts into that one, or sets there (a
    proxy, say), is for it as well.
    """
    path = f"{place.models_dir}/{folder}"
    fields = {
        "command": list(settings.convert_command),
        "args": [*args, f"--out={path}"],
        "env": [*podparts.env({"TOKENIZERS_PARALLELISM": "false"}, template), *env],
        "volumeMounts": [
            *podparts.SCRATCH_MOUNTS,
            place.models_mount,
            *mounts,
            *podparts.own_mounts(template),
        ],
    }
    container = podparts.container(place.name, image, template, fields)
    return ModelFiles(path, (container,), (place.models,), (place.models_mount,))


def _copied(image: str, place: Place) -> ModelFiles:
    """An image that holds the model in its /models folder."""
    fields = {
        "command": ["cp", "-r"],
        "args": [f"{IMAGE_DIR}/.", COPY_DIR],
        "volumeMounts": [{"name": place.models_volume, "mountPath": COPY_DIR}],
    }
    container = podparts.container(place.name, image, Template(), fields)
    return ModelFiles(place.models_dir, (container,), (place.models,), (place.models_mount,))
