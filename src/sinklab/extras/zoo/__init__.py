"""Families, decoders and recipes beyond those of the two papers."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    **{"decoding.blocks": "Alpha Dynamic Editing Elastic ElasticStep"},
    dit_recipes="ddpm_cache published_loss published_noise semi_ar",
    renoising="ANNOUNCED CanvasDenoiser RenoisedStep Renoising renoise",
)

PROVIDES = {
    "backbones": "dit llada_moe",
    # llada2 brings llada_moe
    "families": "adapted dit gemma llada2 masked",
    "schedules": "decoding.blocks",
}
