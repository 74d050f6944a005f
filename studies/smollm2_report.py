"""Tables and figures of smollm2_diffusion.py, from its results alone."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import smollm2_contrasts as contrasts


def report(found: dict[str, Any], folder: Path) -> None:
    """Print the tables as Markdown, and draw the figures, from the results."""
    tables = (
        outcome_table,
        lone_table,
        strength_table,
        control_table,
        channel_table,
        conversion_table,
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
    draw(found, folder)
    draw_conversion(found, folder)
    print("\n".join(lines))


def having(found: dict[str, Any], part: str) -> dict[str, Any]:
    """What was measured of a part, by model."""
    return {name: one[part] for name, one in found.items() if part in one}


def seeds_together(found: dict[str, Any], part: str) -> dict[str, list[Any]]:
    """What was measured of a part at 0.5M tokens, a list over the seeds of each sibling; of a model
    that is not trained a list of one. Other points are those of the curve (`conversion_table`).
    """
    grouped: dict[str, list[Any]] = {}
    for name, one in having(found, part).items():
        sibling, *rest = name.split("-")
        if not rest or rest == ["sink"]:
            grouped[name] = [one]
        elif rest[1] == str(contrasts.STEPS):
            grouped.setdefault(sibling, []).append(one)
    return {
        label if len(seeds) == 1 else f"{label}, {len(seeds)} seeds": seeds
        for label, seeds in grouped.items()
    }


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
    every = contrasts.REGISTERED + contrasts.DESCRIBED
    first = contrasts.contrasts(found, "1", every)
    for keys in ("1", "25 %"):
        for name, one in contrasts.contrasts(found, keys, every).items():
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
    lines = [
        "| model | masked | peaks in the parent's channel | channels | magnitude | pairs kept |"
    ]
    lines.append("|---|---|---|---|---|---|")
    if "channel" not in found.get("parent", {}):
        return lines
    channel = contrasts.parent_channel(found)
    for name, seeds in seeds_together(found, "channel").items():
        for ratio in seeds[0]:
            counted: Counter[str] = Counter()
            inside, sizes = [], []
            for one in seeds:
                of_texts = one[ratio]["channels"]
                for shares in of_texts:
                    counted.update(shares)
                inside.append([100 * shares.get(channel, 0.0) for shares in of_texts])
                sizes += [size for size in one[ratio]["size"] if size is not None]
            total = max(counted.total(), 1e-9)
            most = ", ".join(
                f"{which} {share / total:.0%}" for which, share in counted.most_common(3)
            )
            size = f"{np.median(sizes):,.0f}" if sizes else "–"
            kept = shown([one[ratio]["kept_pairs"] for one in seeds])
            lines.append(f"| {name} | {ratio} | {shown(inside, 1)} % | {most} | {size} | {kept} |")
    return lines


def conversion(found: dict[str, Any], sibling: str) -> dict[int, dict[str, Any]]:
    """Points of seed 0 of a sibling by steps in all (1,024 tokens each), the untrained lifted
    parent first.
    """
    points = {0: found["lifted"]} if "lifted" in found else {}
    for name, one in found.items():
        if name.startswith(f"{sibling}-0-"):
            points[int(name.split("-")[-1])] = one
    return dict(sorted(points.items()))


CONVERSION = {
    "held-out bound": lambda one: one["bound"]["loss"]["clean"],
    "strongest key blocked": lambda one: np.subtract(
        one["bound"]["loss"]["strongest"], one["bound"]["loss"]["clean"]
    ),
    "strong heads, share": lambda one: one["strength"]["0.15"]["strong_heads"],
    "strongest key": lambda one: one["strength"]["0.15"]["strongest_share"],
    "first token": lambda one: one["strength"]["0.15"]["first_share"],
    "added token": lambda one: one["strength"]["0.15"]["added_share"],
    "value norm": lambda one: one["value_norms"]["ratio"],
}
"""Column of the curve -> its numbers by text, of a point; the shares at mask ratio 0.15."""


def by_text(column: str, one: dict[str, Any]) -> Any:
    """Numbers of a column of the curve by text; None where they were not measured."""
    try:
        values = CONVERSION[column](one)
    except KeyError:
        return None
    return None if values is None else np.asarray(values)


def conversion_table(found: dict[str, Any]) -> list[str]:
    """The curve of the conversion: what becomes of the sink over the tokens that were trained."""
    lines = ["| model | tokens | " + " | ".join(CONVERSION) + " | mobility |"]
    lines.append("|---" * (3 + len(CONVERSION)) + "|")
    for sibling in ("iii", "iv"):
        for steps, one in conversion(found, sibling).items():
            numbers = [by_text(column, one) for column in CONVERSION]
            cells = ["–" if values is None else shown(values) for values in numbers]
            moved = f"{one['motion']['value']:.2f}" if "motion" in one else "–"
            cells.append(moved)
            lines.append(f"| {sibling} | {steps / 1000:g}M | {' | '.join(cells)} |")
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
    for name, seeds in seeds_together(found, "value_norms").items():
        lines.append(f"| {name} | {shown([one['ratio'] for one in seeds])} |")
    return lines


def bound_table(found: dict[str, Any]) -> list[str]:
    """Held-out loss, and what blocking the strongest key of every head costs; iv less iii on the
    same rows and noise.
    """
    # other points are those of the curve, and seed 0 alone has this part
    parts = {
        name: one
        for name, one in having(found, "bound").items()
        if name.endswith(f"-{contrasts.STEPS}")
    }
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


TEXTS = {
    "as it is": "plain",
    "first dropped": "dropped",
    "start token": "start",
    "end seen": "padded",
    "end hidden": "hidden",
}
"""Texts of `start_and_padding` as the table names them."""


def start_table(found: dict[str, Any]) -> list[str]:
    """Start token and padding."""
    lines = [
        "| model | text | loss | less plain | strong heads, % | first column | strongest key "
        "elsewhere |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for name, arms in having(found, "start").items():
        usual = np.array(arms["as it is"]["loss"])
        for arm, one in arms.items():
            point = name if arm == "as it is" else ""
            change = "–" if arm == "as it is" else shown(np.array(one["loss"]) - usual)
            heads, first = shown(100 * np.array(one["strong_heads"]), 1), shown(one["first"])
            end = f"; padding {np.mean(one['end']):.3f}" if one["end"] else ""
            lines.append(
                f"| {point} | {TEXTS[arm]} | {usual.mean():.2f} | {change} | {heads} | "
                f"{first}{end} | {one['moved']:.0%} |"
            )
    return lines


def benchmark_table(found: dict[str, Any]) -> list[str]:
    """Documents answered right, %, and points over that with keys blocked, paired by document."""
    lines = [
        "| model | benchmark | right | 5 keys held | blocked | 5 random | 10 keys | 10 random |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, cells in having(found, "benchmarks").items():
        for task in dict.fromkeys(cell.split("-")[0] for cell in cells):
            clean_N = 100 * np.array(cells[f"{task}-k0"]["right"])
            columns = [name, task, shown(clean_N, 1), f"{cells[f'{task}-k5']['held']:.0%}"]
            for blocked in ("k5", "k5-random", "k10", "k10-random"):
                change = ""
                if f"{task}-{blocked}" in cells:
                    right_N = 100 * np.array(cells[f"{task}-{blocked}"]["right"])
                    change = shown(right_N - clean_N, 1)
                columns.append(change)
            lines.append(f"| {' | '.join(columns)} |")
    return lines


def shown(values: Any, digits: int = 3) -> str:
    """A mean over texts, or over seeds and texts crossed, with its interval."""
    values_ST = np.atleast_2d(np.asarray(values, float))
    # a text without strong heads has no number
    whole_ST = values_ST[:, ~np.isnan(values_ST).any(0)]
    one = contrasts.crossed(whole_ST)
    return f"{one.value:.{digits}f} ({one.low:.{digits}f} … {one.high:.{digits}f})".replace(
        "-", "−"
    )


def lone_table(found: dict[str, Any]) -> list[str]:
    """What the key of a row that sees itself alone gets, and its spike."""
    words = {
        "causal": "causal: key 0",
        "all_first": "causal, row 0 sees all: key 0",
        "full": "full: key 0",
        "alone-0": "full, row 0 alone: key 0",
        "alone-30": "full, row 30 alone: key 30",
    }
    columns = seeds_together(found, "lone")
    # full attention on the parent's weights is the lifted parent
    columns.pop("lifted", None)
    lines = ["| attention | " + " | ".join(columns) + " |", "|---" * (1 + len(columns)) + "|"]
    for name, said in words.items():
        cells = []
        for seeds in columns.values():
            spike = np.median([one[name]["greatest"] for one in seeds])
            cells.append(f"{shown([one[name]['share'] for one in seeds])}, spike {spike:,.0f}")
        lines.append(f"| {said} | " + " | ".join(cells) + " |")
    lines += ["", "| model | the added token sees itself alone | it sees all |", "|---|---|---|"]
    for name, seeds in seeds_together(found, "added").items():
        cells = []
        for seen in ("alone", "all"):
            # seeds differ too much for an interval
            points = [
                f"{np.mean(one[seen]['share']):.3f}, spike {np.median(one[seen]['spike']):,.0f}"
                for one in seeds
            ]
            cells.append("; ".join(points))
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return lines


def strength_table(found: dict[str, Any]) -> list[str]:
    """Strong heads, the strongest key's share and the first token's, by mask ratio."""
    lines = [
        "| model | masked | heads with a strong key, % | strongest key | first token | strong "
        "keys stand on |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for point, seeds in seeds_together(found, "strength").items():
        for number, ratio in enumerate(seeds[0]):
            name = "" if number else point
            rows = [one[ratio] for one in seeds]
            counted: Counter[str] = Counter()
            for row in rows:
                counted.update(row["tokens"])
            tokens = ", ".join(
                f"{token!r} {share / len(rows):.0%}" for token, share in counted.most_common(2)
            )
            strong = shown([100 * np.array(row["strong_heads"]) for row in rows], 1)
            shares = [
                shown([row[field] for row in rows]) for field in ("strongest_share", "first_share")
            ]
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
    kept = seeds_together(found, "kept")
    for name, seeds in seeds_together(found, "costs").items():
        none_ST = np.array([one["none"] for one in seeds])
        for which in seeds[0]["keys"]:
            keys = [one["keys"][which] for one in seeds]
            if which != "1" and keys == [one["keys"]["1"] for one in seeds]:
                # one key takes as much by itself
                continue
            rises = {
                arm: shown(np.array([own["loss"][arm] for own in keys]) - none_ST)
                for arm in keys[0]["loss"]
            }
            memory = "–"
            for label, parts in kept.items():
                if which == "1" and label.split(",")[0] == name.split(",")[0]:
                    losses = [part["loss"] for part in parts]
                    memory = shown([np.subtract(one["blocked"], one["none"]) for one in losses])
                    if len(parts) < len(seeds):
                        memory += f", {len(parts)} of {len(seeds)} seeds"
            removed = 100 * np.mean([own["removed"] for own in keys])
            lines.append(
                f"| {name} | {none_ST.mean():.2f} | {keys[0]['k']} | {removed:.1f} | "
                f"{rises['all']} | {rises['late']} | {memory} | {rises['random all']} | "
                f"{rises['random late']} |"
            )
    return lines


def draw(found: dict[str, Any], folder: Path) -> None:
    """The share of the first token and of the strongest key over the mask ratio, for every
    model.
    """
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for name, seeds in seeds_together(found, "strength").items():
        ratios = [float(ratio) for ratio in seeds[0]]
        for axis, field in zip(axes, ("strongest_share", "first_share"), strict=True):
            shares = [np.mean([one[ratio][field] for one in seeds]) for ratio in seeds[0]]
            axis.plot(ratios, shares, marker="o", label=name)
    axes[0].set_ylabel("mean weight")
    axes[0].set_title("strongest key of a head")
    axes[1].set_title("first token")
    for axis in axes:
        axis.set_xlabel("share of tokens that are masked")
        axis.set_ylim(0, None)
    axes[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(folder / "strength.png", dpi=150)
    plt.close(figure)


def draw_conversion(found: dict[str, Any], folder: Path) -> None:
    """The curve of the conversion: bound, cost of a block, shares and value norm over the tokens
    that were trained.
    """
    import matplotlib.pyplot as plt

    panels = {
        "held-out bound, nats a token": ("held-out bound",),
        "nats when the strongest key is blocked": ("strongest key blocked",),
        "mean weight at mask ratio 0.15": ("strongest key", "first token", "added token"),
        "value norm of the sink over others": ("value norm",),
    }
    figure, axes = plt.subplots(1, 4, figsize=(13, 3.2), layout="constrained")
    for axis, (title, columns) in zip(axes, panels.items(), strict=True):
        for colour, sibling in enumerate(("iii", "iv")):
            for column, style in zip(columns, ("-", ":", "--"), strict=False):
                numbers = {}
                for steps, one in conversion(found, sibling).items():
                    values = by_text(column, one)
                    if values is not None:
                        numbers[steps * 1024 / 1e6] = np.nanmean(values)
                if not numbers:
                    continue
                label = f"{sibling}, {column}" if len(columns) > 1 else sibling
                axis.plot(
                    numbers.keys(),
                    numbers.values(),
                    style,
                    marker="o",
                    ms=3,
                    color=f"C{colour}",
                    label=label,
                )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("tokens trained, millions")
        axis.set_xscale("symlog", linthresh=0.1)
        axis.set_xticks([0, 0.1, 0.3, 1, 3], ["0", "0.1", "0.3", "1", "3"])
        axis.legend(fontsize=7)
    figure.savefig(folder / "conversion.png", dpi=150)
    plt.close(figure)
