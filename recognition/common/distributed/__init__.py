"""Many processes that train one model: what they exchange, and the engines that carry it."""
