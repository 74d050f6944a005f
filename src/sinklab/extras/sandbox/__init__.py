"""Programs that models write (HumanEval's completions), run inside bubblewrap or not at all."""

PROVIDES = {"sandboxes": "humaneval"}
