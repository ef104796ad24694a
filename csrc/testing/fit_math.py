"""The polynomials of csrc/kernels/math.h: minimax fits in float64 (Remez), rounded to float32. Prints the C++ lines."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
import numpy as np

Function = Callable[[mpmath.mpf], mpmath.mpf]


def minimax(f: Function, weight: Function, low: float, high: float, degree: int) -> tuple[np.ndarray, float]:
    """Coefficients c, lowest first, with the least maximum of ``weight(x) |f(x) - sum c_k x^k|``; and that maximum."""
    grid = (low + high) / 2 - (high - low) / 2 * np.cos(np.linspace(0, np.pi, 4001))
    true, scale = (np.array([float(of(mpmath.mpf(float(x)))) for x in grid]) for of in (f, weight))
    at = np.round(np.linspace(0, len(grid) - 1, degree + 2)).astype(int)
    for _ in range(50):
        signs = (-1.0) ** np.arange(degree + 2) / scale[at]
        solved = np.linalg.solve(np.column_stack([grid[at, None] ** np.arange(degree + 1), signs]), true[at])
        error = scale * (true - np.polynomial.polynomial.polyval(grid, solved[:-1]))
        runs = np.split(np.arange(len(grid)), np.flatnonzero(np.diff(np.sign(error))) + 1)
        peaks = [run[np.argmax(np.abs(error[run]))] for run in runs]
        while len(peaks) > degree + 2:
            peaks.pop(0 if abs(error[peaks[0]]) < abs(error[peaks[-1]]) else -1)
        if len(peaks) < degree + 2 or np.array_equal(peaks, at):
            break
        at = np.array(peaks)
    return solved[:-1], float(np.abs(error).max())


def show(name: str, fit: tuple[np.ndarray, float]) -> None:
    highest_first = ", ".join(f"{np.float32(c):.9g}f" for c in fit[0][::-1])
    print(f"{name}: {highest_first}  // error {fit[1]:.1e}")


def exp_q(r: mpmath.mpf) -> mpmath.mpf:
    """q of ``e^r = 1 + r + r^2 q(r)``."""
    return (mpmath.expm1(r) - r) / r**2 if abs(r) > 1e-9 else 1 / mpmath.mpf(2) + r / 6


def erf_p(s: mpmath.mpf) -> mpmath.mpf:
    """p of ``erf(x) = x + x p(x^2)``."""
    return (mpmath.erf(mpmath.sqrt(s)) / mpmath.sqrt(s) if s else 2 / mpmath.sqrt(mpmath.pi)) - 1


def tail_m(t: mpmath.mpf) -> mpmath.mpf:
    """m of ``Phi(-a) = exp(-a^2 / 2) t m(t)`` with t = 1 / (1 + 0.265 a): among the scales, 0.265 fits best."""
    a = (1 / t - 1) / mpmath.mpf("0.265")
    return mpmath.erfc(a / mpmath.sqrt(2)) / 2 * mpmath.exp(a * a / 2) / t


def main() -> None:
    mpmath.mp.dps = 30
    # Half of ln 2, with a little room for the rounding of the reduction.
    show("expm1_reduced", minimax(exp_q, lambda r: r**2 * mpmath.exp(-r), -0.3467, 0.3467, 4))
    show("erf", minimax(erf_p, lambda s: 1 / (1 + erf_p(s)), 0.0, 1.0, 6))
    # Phi(-14.5) is the last that a float holds.
    show("gaussian", minimax(tail_m, lambda t: 1 / tail_m(t), 1 / (1 + 0.265 * 14.5), 1.0, 8))


if __name__ == "__main__":
    main()
