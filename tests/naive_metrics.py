"""Metrics spelled out, slow and plain, to compare the real ones with."""

import numpy as np


def naive_fold_accuracy(distances, is_same, folds):
    """Spell insightface's protocol out."""
    count = len(distances)
    sizes = [count // folds + (fold < count % folds) for fold in range(folds)]
    found, start = [], 0
    for size in sizes:
        test = range(start, start + size)
        best, best_right = None, -1
        for step in range(400):
            threshold = np.arange(0, 4, 0.01)[step]
            right = sum(
                (distances[i] < threshold) == is_same[i] for i in range(count) if i not in test
            )
            if right > best_right:
                best, best_right = threshold, right
        found.append(np.mean([(distances[i] < best) == is_same[i] for i in test]))
        start += size
    return np.mean(found), np.std(found)
