"""The picture of bench.scaling: what each policy costs, and how pools went over a trace."""

from collections.abc import Mapping

from bench.common import OUT, ROOT
from bench.scaling_kept import Kept

FILE = "scaling-costs.png"
_OURS, _OTHER, _ORACLE = "#d1495b", "#8d99ae", "#00798c"
_ORACLES = ("best_fixed", "clairvoyant")

Done = Mapping[str, tuple[Mapping[str, Kept | None], float]]
"""By cell: each policy's run, and the bound in GPU-hours."""


def draw(done: Done, whole: bool) -> None:
    """Writes bench/out/scaling-costs.png, and the documents' copy after a whole run."""
    done = {name: one for name, one in done.items() if one[0]}
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(done), 3) or 1
    rows = -(-len(done) // columns) or 1
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 2.6 * rows), dpi=110, squeeze=False
    )
    for axes in grid.flat[len(done) :]:
        axes.axis("off")
    for axes, (name, (results, bound)) in zip(grid.flat, done.items(), strict=False):
        shown = {key: r for key, r in results.items() if r is not None and r.whole}
        names = sorted(shown, key=lambda key: shown[key].gpu_hours, reverse=True)
        colors = [
            _OURS if key == "ours" else _ORACLE if key in _ORACLES else _OTHER for key in names
        ]
        axes.barh(names, [shown[key].gpu_hours for key in names], color=colors)
        axes.axvline(bound, color="black", linewidth=0.8, linestyle=":")
        axes.set_title(name.replace("_", " "), loc="left", fontsize=9)
        axes.tick_params(labelsize=7)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(
        "GPU-hours of those who reach 99% within both targets (dotted: bound)", x=0.01,
        ha="left", fontsize=10,
    )  # fmt: skip
    figure.tight_layout()
    OUT.mkdir(parents=True, exist_ok=True)
    for folder in (OUT, ROOT / "docs" / "images") if whole else (OUT,):
        figure.savefig(folder / FILE, facecolor="white")
    plt.close(figure)
