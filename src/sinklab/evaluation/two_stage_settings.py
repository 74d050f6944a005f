"""Numbers of the sink-token paper's GSM8K protocol."""

from __future__ import annotations

import dataclasses

from sinklab.sampling.settings import DecodingSettings

LENGTH = 256
"""Tokens of question, steps and answer together."""
BATCH = 64
SEED = 1234


def two_stage_settings(given: DecodingSettings | None = None, *, published: bool = False) -> DecodingSettings:
    """How each stage is decoded: what the released code does, but for what was asked for.

    256 evaluations on SMDM's clock (eps 1e-5), the most confident tokens first. ``published`` draws at temperature 0.1
    and ranks the candidates of 64 rows together, so that answers depend on their batch; else nothing is drawn, each row
    is decoded by itself and ends at its end of text.

    Args:
        given: settings whose fields, where they are not the defaults of their class, replace the protocol's.
        published: as released.

    Source: One Token Is Enough (2601.19657), ``evaluate_gsm8k`` and SMDM's ``diff_sample``.
    """
    own = DecodingSettings(
        rule="low_confidence",
        schedule="timed",
        eps=1e-5,
        steps=LENGTH,
        temperature=0.1 if published else 0.0,
        pooled=published,
        stop_at_eos=not published,
        seed=SEED,
    )
    if given is None:
        return own
    defaults = {field.name: field.default for field in dataclasses.fields(given)}
    names = [field.name for field in dataclasses.fields(DecodingSettings)]
    asked = {name: getattr(given, name) for name in names if getattr(given, name) != defaults[name]}
    if asked.get("schedule", "timed") != "timed" or "rule" in asked:
        # numbers of the clock belong to nothing else; other schedules find their own steps
        own = dataclasses.replace(own, schedule=None, eps=None, pooled=False, steps=None)
    return dataclasses.replace(own, **asked)
