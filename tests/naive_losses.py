"""Every loss of the family in float64, a row at a time, written from the paper's formulas.

A loss is a function of a row's cosines z (K,), its label y and its negatives. Gradients are central
differences in z, carried over to embeddings and class weights by the cosine's own derivative.
"""

from __future__ import annotations

import numpy as np

STEP = 1e-6


def psi(theta, m1):
    """SphereFace's continuation of cos(m1 θ)."""
    k = np.floor(m1 * theta / np.pi)
    k = min(k, np.ceil(m1) - 1)
    return (-1) ** k * np.cos(m1 * theta) - 2 * k


def arc(z, m2):
    theta = np.arccos(np.clip(z, -1, 1))
    return np.cos(theta + m2) if theta + m2 < np.pi else z - m2 * np.sin(m2)


def combined(z, m1, m2, m3):
    if m1 == 1:
        return arc(z, m2) - m3
    angle = m1 * np.arccos(np.clip(z, -1, 1)) + m2
    k = np.floor(angle / np.pi)
    return (-1) ** k * np.cos(angle) - 2 * k - m3


def log_one_plus_sum(exponents):
    """log(1 + Σ e^a), without overflow."""
    exponents = np.append(np.asarray(exponents, float), 0.0)
    top = exponents.max()
    return top + np.log(np.exp(exponents - top).sum())


def entangled(target):
    """log(1 + Σ e^{s z_k} / e^{s φ(z_y)})."""

    def loss(z, y, negatives, offset, s, target_of=target, **options):
        phi = target_of(z[y], **options)
        return log_one_plus_sum([s * z[k] + offset[k] - s * phi for k in negatives])

    return loss


def dsoftmax(z, y, negatives, offset, s, d, inter_weight=1.0):
    """log(1 + ε / e^{s z_y}) + log(1 + Σ e^{s z_k}), ε = e^{s d}."""
    inter = log_one_plus_sum([s * z[k] + offset[k] for k in negatives])
    return log_one_plus_sum([s * d - s * z[y]]) + inter_weight * inter


def dissected_with(target):
    """D-Softmax's intra part, and a softmax whose z_y is a constant for the gradient."""

    def loss(z, y, negatives, offset, s, d, constant_z_y, **options):
        phi = target(constant_z_y, **options)
        inter = log_one_plus_sum([s * z[k] + offset[k] - s * phi for k in negatives])
        return log_one_plus_sum([s * d - s * z[y]]) + inter

    return loss


LOSSES = {
    "softmax": entangled(lambda z: z),
    "sphereface": entangled(lambda z, m1, lam: (lam * z + psi(np.arccos(z), m1)) / (1 + lam)),
    "cosface": entangled(lambda z, m3: z - m3),
    "arcface": entangled(arc),
    "combined": entangled(combined),
    "adaface": entangled(
        lambda z, m, q: np.cos(np.clip(np.arccos(z) - m * q, 0, np.pi)) - m - m * q
    ),
    "dsoftmax": dsoftmax,
    "dsoftmax_softmax": dissected_with(lambda z: z),
    "dsoftmax_arcface": dissected_with(arc),
}


def cosines(x, weights, normalize):
    if not normalize:
        return weights @ x
    lengths = np.linalg.norm(weights, axis=1) * np.linalg.norm(x)
    return np.clip(weights @ x / np.where(lengths > 0, lengths, 1), -1, 1)


def compute(name, x, weights, labels, negatives, offset, s, normalize=True, per_row=(), **options):
    """Return the losses (B,) and the gradients of their sum, (B, D) and (K, D).

    `negatives` is a list of classes a row; `per_row` has further options of each row.
    """
    x, weights = np.asarray(x, float), np.asarray(weights, float)
    losses, to_x, to_weights = np.zeros(len(x)), np.zeros_like(x), np.zeros_like(weights)
    for row, (label, of_row) in enumerate(zip(labels, negatives)):
        z = cosines(x[row], weights, normalize)
        own = dict(options, **(per_row[row] if per_row else {}))
        if name in ("dsoftmax_softmax", "dsoftmax_arcface"):
            own["constant_z_y"] = z[label]

        def loss(z, label=label, of_row=of_row, own=own):
            return LOSSES[name](z, label, of_row, offset, s, **own)

        losses[row] = loss(z)
        for k in {label, *of_row}:
            shift = np.eye(len(z))[k]
            up, down = z[k] + STEP, z[k] - STEP
            if normalize:  # at the ends of [-1, 1] a one-sided difference
                up, down = min(up, 1), max(down, -1)
            slope = (loss(z + shift * (up - z[k])) - loss(z + shift * (down - z[k]))) / (up - down)
            jacobian_x, jacobian_w = cosine_gradients(x[row], weights[k], normalize)
            to_x[row] += slope * jacobian_x
            to_weights[k] += slope * jacobian_w
    return losses, to_x, to_weights


def cosine_gradients(x, w, normalize):
    if not normalize:
        return w, x
    length_x, length_w = np.linalg.norm(x), np.linalg.norm(w)
    if length_x == 0 or length_w == 0:  # no direction: cosine 0, gradient 0
        return np.zeros_like(x), np.zeros_like(w)
    x, w = x / length_x, w / length_w
    return (w - (x @ w) * x) / length_x, (x - (x @ w) * w) / length_w
