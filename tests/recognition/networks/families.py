"""One network of each of insightface's families, small enough for a test."""

SMALL = {
    "r18": {"multiplier": 0.125, "units_per_stage": (1, 1, 1, 1), "image_size": (32, 32)},
    "y1": {"multiplier": 0.5, "image_size": (32, 32)},
    "m05": {"multiplier": 0.25, "image_size": (32, 32)},
    "mnas025": {"image_size": (32, 32)},
    "d121": {"stem": 32, "growth": 32, "units_per_stage": (1, 1, 1, 1), "image_size": (32, 32)},
    "vargfacenet": {"multiplier": 0.25, "image_size": (97, 97)},
}
