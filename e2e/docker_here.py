"""`docker build` and `docker push` as the documents have them, for a cluster without a registry:
`python -m e2e.docker_here CLUSTER build -f FILE -t REFERENCE .`.

What is built is built as by `e2e.cluster.images`, on our own base and with the thin engine; what
is pushed is imported into the cluster under the very name that was pushed.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace

from e2e.cluster import images
from e2e.cluster.images import Image
from e2e.cluster.layout import Layout

_PART = re.compile(r"pdcluster-([a-z]+):")
_THIN = {"engine": "engine-thin"}


def image(reference: str) -> Image:
    """Ours, called so. ValueError for a name that is none of ours."""
    found = _PART.search(reference)
    name = found[1] if found else ""
    known = images.IMAGES.get(_THIN.get(name, name))
    if known is None:
        raise ValueError(f"{reference} is no image of ours")
    return replace(known, called=reference)


def run(cluster: str, words: Sequence[str]) -> None:
    match words:
        case ["build", "-f", file, "-t", reference, "."]:
            wanted = image(reference)
            if file != f"images/{wanted.file}":
                raise ValueError(f"{file} doesn't make {reference}")
            with images.alone():
                images.build(wanted)
        case ["push", reference]:
            with images.alone():
                images.load(image(reference), Layout(cluster))
        case _:
            raise ValueError(f"docker {' '.join(words)}: not in the documents")


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
