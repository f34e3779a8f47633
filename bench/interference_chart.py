"""The picture of bench.interference: each gap between tokens, over time."""

from collections.abc import Mapping, Sequence

from bench.common import OUT, ROOT

_COLORS = ("#d1495b", "#edae49", "#00798c", "#8d99ae")


def draw(
    file: str, series: Mapping[str, Sequence[tuple[float, float]]], title: str, quick: bool
) -> None:
    """Writes bench/out/FILE, and the documents' copy after a whole run.

    `series`: name -> (seconds since the prompt came, gap in seconds) of all chats.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.6), dpi=120)
    for (name, samples), color in zip(series.items(), _COLORS, strict=False):
        ordered = sorted(samples)
        worst_ms = max(gap for _, gap in ordered) * 1000
        axes.plot(
            [at for at, _ in ordered],
            [gap * 1000 for _, gap in ordered],
            ".",
            markersize=5,
            color=color,
            label=f"{name} (worst {worst_ms:,.0f} ms)",
        )
    axes.set_yscale("log")
    axes.set_xlabel("seconds since the long prompt came")
    axes.set_ylabel("wait for the next token, ms")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
    OUT.mkdir(parents=True, exist_ok=True)
    for folder in (OUT,) if quick else (OUT, ROOT / "docs" / "images"):
        figure.savefig(folder / file, bbox_inches="tight", facecolor="white")
    plt.close(figure)
