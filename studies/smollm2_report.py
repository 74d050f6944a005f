"""Tables and figures of smollm2_diffusion.py, from its results alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import smollm2_contrasts as contrasts
import smollm2_measures as measures


def report(found: dict[str, Any], folder: Path) -> None:
    """The tables as Markdown, and the figures, from the results."""
    tables = (
        outcome_table,
        lone_table,
        strength_table,
        control_table,
        channel_table,
        motion_table,
        cost_table,
        contrast_table,
        value_table,
        bound_table,
        start_table,
        benchmark_table,
    )
    lines = []
    for table in tables:
        lines += [*table(found), ""]
    (folder / "tables.md").write_text("\n".join(lines), "utf-8")
    draw(found, folder)
    print("\n".join(lines))


def having(found: dict[str, Any], part: str) -> dict[str, Any]:
    """What was measured of a part, by model."""
    return {name: one[part] for name, one in found.items() if part in one}


def outcome_table(found: dict[str, Any]) -> list[str]:
    """The six primary outcomes, corrected together, and what so many texts and seeds could have
    shown.
    """
    lines = ["| question | outcome | p | stands the correction |", "|---|---|---|---|"]
    for one in contrasts.outcomes(found):
        stands = "yes" if one.holds is not None else "no"
        lines.append(f"| {one.name} | {one.sentence} | {one.p:.2g} | {stands} |")
    return lines


def contrast_table(found: dict[str, Any]) -> list[str]:
    """Question 4 in numbers: what late blocks cost one model less another, and what could have been
    seen.
    """
    lines = [
        "| keys | contrast | nats | seeds × texts | could have been seen |",
        "|---|---|---|---|---|",
    ]
    first = contrasts.contrasts(found, "1")
    for keys in ("1", "25 %"):
        for name, one in contrasts.contrasts(found, keys).items():
            if one.texts and (keys == "1" or one != first[name]):
                lines.append(
                    f"| {keys} | {name} | {one} | {one.seeds} × {one.texts} | {one.reach:.3f} |"
                )
    return lines


def control_table(found: dict[str, Any]) -> list[str]:
    """Strong heads and the strongest key of every model beside those with its weights shuffled."""
    lines = [
        "| model | masked | strong heads, % | shuffled weights | strongest key | shuffled weights |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for name, controls in having(found, "controls").items():
        for ratio, control in controls.items():
            own = found[name]["strength"][ratio]
            heads = [shown(100 * np.array(one["strong_heads"]), 1) for one in (own, control)]
            shares = [shown(one["strongest_share"]) for one in (own, control)]
            lines.append(
                f"| {name} | {ratio} | {heads[0]} | {heads[1]} | {shares[0]} | {shares[1]} |"
            )
    return lines


def channel_table(found: dict[str, Any]) -> list[str]:
    """The channel in which the hidden state of the strong keys peaks, and how many pairs keep the
    first token.
    """
    parts = having(found, "channel")
    lines = [
        "| model | masked | peaks in the parent's channel | channels | magnitude | pairs kept |"
    ]
    lines.append("|---|---|---|---|---|---|")
    if "parent" not in parts:
        return lines
    channel = contrasts.parent_channel(found)
    for name, by_ratio in parts.items():
        for ratio, one in by_ratio.items():
            counted: Counter[str] = Counter()
            for shares in one["channels"]:
                counted.update(shares)
            total = max(counted.total(), 1e-9)
            most = ", ".join(
                f"{which} {share / total:.0%}" for which, share in counted.most_common(3)
            )
            inside = shown([100 * shares.get(channel, 0.0) for shares in one["channels"]], 1)
            sizes = [size for size in one["size"] if size is not None]
            size = f"{np.median(sizes):,.0f}" if sizes else "–"
            lines.append(
                f"| {name} | {ratio} | {inside} % | {most} | {size} | {shown(one['kept_pairs'])} |"
            )
    return lines


def motion_table(found: dict[str, Any]) -> list[str]:
    """Mobility while texts are written, and under another draw of masks of equal ratio."""
    lines = [
        "| model | compared | word | mobility | redrawn at 0.15 | at 0.5 | at 0.9 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in having(found, "motion").items():
        span = f"{one['value']:.2f} ({one['low']:.2f} … {one['high']:.2f})"
        drawn = [
            f"{np.nanmean(values):.2f}" if np.isfinite(values).any() else "–"
            for values in one["redrawn"].values()
        ]
        lines.append(
            f"| {name} | {one['reading']} | {one['word']} | {span} | {' | '.join(drawn)} |"
        )
    return lines


def value_table(found: dict[str, Any]) -> list[str]:
    """Norm of the strongest key's value over the mean of the others."""
    lines = ["| model | value norm |", "|---|---|"]
    return lines + [
        f"| {name} | {shown(one['ratio'])} |" for name, one in having(found, "value_norms").items()
    ]


def bound_table(found: dict[str, Any]) -> list[str]:
    """Held-out loss, and what blocking the strongest key of every head costs; iv less iii on the
    same rows and noise.
    """
    parts = having(found, "bound")
    lines, arms = (
        [],
        [*dict.fromkeys(arm for one in parts.values() for arm in one["loss"] if arm != "clean")],
    )
    lines.append("| model | clean | " + " | ".join(arms) + " |")
    lines.append("|---" * (2 + len(arms)) + "|")
    for name, one in parts.items():
        clean = np.array(one["loss"]["clean"])
        cells = [shown(np.array(one["loss"][arm]) - clean) for arm in arms]
        lines.append(f"| {name} | {shown(clean, 2)} | " + " | ".join(cells) + " |")
    for name, one in parts.items():
        other = name.replace("iv-", "iii-", 1)
        if name.startswith("iv-") and other in parts:
            less = np.array(one["loss"]["clean"]) - np.array(parts[other]["loss"]["clean"])
            lines.append(f"| {name} less {other} | {shown(less)} |" + " |" * len(arms))
    return lines


def start_table(found: dict[str, Any]) -> list[str]:
    """Start token and padding."""
    lines = [
        "| model | text | loss | less as it is | strong heads, % | first column | strongest key "
        "elsewhere |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, arms in having(found, "start").items():
        usual = np.array(arms["as it is"]["loss"])
        for arm, one in arms.items():
            point = name if arm == "as it is" else ""
            change = "–" if arm == "as it is" else shown(np.array(one["loss"]) - usual)
            heads, first = shown(100 * np.array(one["strong_heads"]), 1), shown(one["first"])
            end = f"; end tokens {np.mean(one['end']):.3f}" if one["end"] else ""
            lines.append(
                f"| {point} | {arm} | {usual.mean():.2f} | {change} | {heads} | {first}{end} | "
                f"{one['moved']:.0%} |"
            )
    return lines


def benchmark_table(found: dict[str, Any]) -> list[str]:
    """Scores of the benchmarks, a row a cell and metric."""
    lines = ["| model | cell | metric | score |", "|---|---|---|---|"]
    for name, cells in having(found, "benchmarks").items():
        for cell, rows in cells.items():
            lines += [f"| {name} | {cell} | {row['metric']} | {row['value']:.3f} |" for row in rows]
    return lines


def shown(values: Any, digits: int = 3) -> str:
    """A mean over texts with its interval."""
    one = measures.interval(values)
    return f"{one['mean']:.{digits}f} ({one['low']:.{digits}f} … {one['high']:.{digits}f})".replace(
        "-", "−"
    )


def lone_table(found: dict[str, Any]) -> list[str]:
    """What the key of a row that sees itself alone gets, and its spike."""
    names = ("causal", "all_first", "full", "alone-0", "alone-30")
    every, found = found, {name: one for name, one in found.items() if "lone" in one}
    words = (
        "causal: key 0",
        "causal, row 0 sees all: key 0",
        "full: key 0",
        "full, row 0 alone: key 0",
    )
    words += ("full, row 30 alone: key 30",)
    columns = [name for name in ("parent", *found) if name in found and name != "lifted"]
    lines = ["| attention | " + " | ".join(dict.fromkeys(columns)) + " |"]
    lines.append("|---" * (1 + len(dict.fromkeys(columns))) + "|")
    for name, said in zip(names, words, strict=True):
        cells = []
        for column in dict.fromkeys(columns):
            one = found[column]["lone"][name]
            cells.append(f"{shown(one['share'])}, spike {np.median(one['greatest']):,.0f}")
        lines.append(f"| {said} | " + " | ".join(cells) + " |")
    lines += ["", "| model | the added token sees itself alone | it sees all |", "|---|---|---|"]
    for name, one in having(every, "added").items():
        spikes = [np.median(one[seen]["spike"]) for seen in ("alone", "all")]
        shares = [shown(one[seen]["share"]) for seen in ("alone", "all")]
        lines.append(
            f"| {name} | {shares[0]}, spike {spikes[0]:,.0f} | {shares[1]}, spike "
            f"{spikes[1]:,.0f} |"
        )
    return lines


def strength_table(found: dict[str, Any]) -> list[str]:
    """Strong heads, the strongest key's share and the first token's, by mask ratio."""
    lines = [
        "| model | masked | heads with a strong key, % | strongest key | first token | strong "
        "keys stand on |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for point, by_ratio in having(found, "strength").items():
        for number, (ratio, row) in enumerate(by_ratio.items()):
            name = "" if number else point
            tokens = ", ".join(
                f"{token!r} {share:.0%}" for token, share in list(row["tokens"].items())[:2]
            )
            strong = shown(100 * np.array(row["strong_heads"]), 1)
            shares = shown(row["strongest_share"]), shown(row["first_share"])
            lines.append(f"| {name} | {ratio} | {strong} | {shares[0]} | {shares[1]} | {tokens} |")
    return lines


def cost_table(found: dict[str, Any]) -> list[str]:
    """What blocking the strongest keys of a text costs, and random ones, in nats; earlier rows anew
    or kept.
    """
    lines = [
        "| model | loss | keys | removed, % | all, anew | late, anew | late, rows kept | random, "
        "all | random, late |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for name, one in having(found, "costs").items():
        none = np.array(one["none"])
        for which, keys in one["keys"].items():
            if which != "1" and keys == one["keys"]["1"]:
                # one key takes as much by itself
                continue
            loss = {arm: np.array(values) - none for arm, values in keys["loss"].items()}
            kept = found[name].get("kept", {}).get("loss") if which == "1" else None
            memory = (
                "–" if kept is None else shown(np.array(kept["blocked"]) - np.array(kept["none"]))
            )
            cells = [shown(loss["all"]), shown(loss["late"]), memory, shown(loss["random all"])]
            said = f"{which}: {keys['k']}" if which != "1" else "1"
            if len([other for other in one["keys"].values() if other == keys]) > 1:
                said = ", ".join(one["keys"])
            removed = 100 * keys["removed"]
            lines.append(
                f"| {name} | {none.mean():.2f} | {said} | {removed:.1f} | {' | '.join(cells)} | "
                f"{shown(loss['random late'])} |"
            )
    return lines


def draw(found: dict[str, Any], folder: Path) -> None:
    """The share of the first token and of the strongest key over the mask ratio, for every
    model.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    colours: dict[str, str] = {}
    for name, by_ratio in having(found, "strength").items():
        # seeds of a sibling share its colour
        sibling = name.split("-")[0]
        label = None if sibling in colours else sibling
        colour = colours.setdefault(sibling, f"C{len(colours)}")
        ratios = [float(ratio) for ratio in by_ratio]
        for axis, field in zip(axes, ("strongest_share", "first_share"), strict=True):
            shares = [np.mean(row[field]) for row in by_ratio.values()]
            axis.plot(ratios, shares, marker="o", color=colour, label=label)
    axes[0].set_ylabel("mean weight")
    axes[0].set_title("strongest key of a head")
    axes[1].set_title("first token")
    for axis in axes:
        axis.set_xlabel("share of tokens that are masked")
        axis.set_ylim(0, None)
    axes[1].legend(fontsize=8)
    figure.savefig(folder / "strength.png", dpi=150)
    plt.close(figure)
