"""Bounds, as bits, on the threshold of a row's filters: see `filters`.

Top-k: the k-th largest line maximum is a lower bound. Top-p: the line maxima give a bound where few
lines hold the mass; otherwise a sample of the row does.
"""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.sampling.kernels.filters import added, bits_of, weight_of
from cairn.ops.select_k.kernels import reached_by


@triton.jit
def wanted_of(share, total, SHARE: tl.constexpr):
    """The sum that the kept weights of a row without top-k must reach; > 0, so that the largest
    weight is kept whatever the share."""
    wanted = share.to(tl.float64)
    if SHARE > 0:
        wanted *= total
    return tl.maximum(wanted, 1e-300)


@triton.jit
def load_tops(tops, row, lines, N: tl.constexpr):
    """The line maxima of a row [N], padded with -inf."""
    i = tl.arange(0, N)
    return tl.load(tops + row * lines + i, mask=i < lines, other=float("-inf"))


@triton.jit
def keys_of(top, peak, temp, lines, SOFTMAX: tl.constexpr):
    """The largest weight of each line as bits, from the output of `load_tops`; padded with 0."""
    inside = tl.arange(0, top.shape[0]) < lines
    return tl.where(inside, bits_of(tl.maximum(weight_of(top, peak, temp, SOFTMAX), 0.0)), 0)


@triton.jit
def tally_lines(line_keys, one, two, three):
    """Of line_keys [N]: the sums, float32, of those >= one, two and three, and the counts of those
    >= two and three. All are bits of weights."""
    first, second, third = line_keys >= one, line_keys >= two, line_keys >= three
    value = line_keys.to(tl.float32, bitcast=True)
    by_one, by_two = tl.where(first, value, 0.0), tl.where(second, value, 0.0)
    # Two 16-bit counts packed into one int32, for one reduction.
    found = second.to(tl.int32) + (third.to(tl.int32) << 16)
    by_one, by_two, by_three, found = tl.reduce(
        (by_one, by_two, tl.where(third, value, 0.0), found), 0, added
    )
    return by_one, by_two, by_three, found & 0xFFFF, found >> 16


@triton.jit
def floor_by_lines(line_keys, floor, end, share, wanted, CHUNKS: tl.constexpr, MOST: tl.constexpr):
    """A lower bound, as bits, on the weights kept by top-p, and the number of lines whose maximum
    is at or above it: at most CHUNKS where such a bound is found, otherwise at most MOST; more than
    MOST if line maxima alone give no bound.

    line_keys: as returned by `keys_of`, below end; floor: a known lower bound; wanted: the sum that
    the kept weights must reach.
    """
    low, high = floor, end
    found, beyond = tl.full([], MOST + 1, tl.int32), tl.full([], 0, tl.int32)
    # First trial values: 2 ** -16 and 2 ** -4 of the largest weight (float32 bits), between which
    # most rows' bounds lie.
    one, two = floor, tl.minimum(tl.maximum(end - (16 << 23), floor), end - 1)
    three = tl.minimum(tl.maximum(end - (4 << 23), floor), end - 1)
    # A margin for the rounding of float32 sums.
    enough = (wanted * 1.00001).to(tl.float32)
    missing = share < 1.0
    if not missing:
        found = tl.sum((line_keys >= floor).to(tl.int32), 0)
    while missing:
        m_one, m_two, m_three, n_two, n_three = tally_lines(line_keys, one, two, three)
        by_one, by_two, by_three = m_one >= enough, m_two >= enough, m_three >= enough
        high = tl.where(by_one, tl.where(by_two, tl.where(by_three, high, three), two), one)
        beyond = tl.where(by_two, tl.where(by_three, beyond, n_three), tl.maximum(beyond, n_two))
        low = tl.where(by_three, three, tl.where(by_two, two, tl.where(by_one, one, low)))
        found = tl.where(by_three, n_three, tl.where(by_two, n_two, found))
        step = tl.maximum((high - low) >> 2, 1)
        one, two, three = low + step, low + 2 * step, low + 3 * step
        missing = (found > CHUNKS) & (beyond <= MOST) & (found - beyond > found // 8)
        missing = missing & (high - low > 1)
    return low, found


@triton.jit
def floor_of(
    line_keys, peak, temp, total, count, share, least, width, lines,
    CHUNKS: tl.constexpr, SOFTMAX: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """A lower bound, as bits, on the weights that the row's filters keep, at or above which at most
    CHUNKS line maxima lie where possible. line_keys: as returned by `keys_of`, used where count >
    0."""
    floor = weight_of(peak, peak, temp, SOFTMAX) * least
    if count > 0:
        # top-p is relative to the sum of the top k, so all of these are needed.
        floor = tl.where(share < 1.0, 0.0, floor)
        if line_keys is not None:  # noqa: SIM102
            if count <= lines:
                # Ask for somewhat more than `count` lines, at most CHUNKS where possible: the
                # looser the target, the fewer search steps.
                enough = tl.maximum(count + count // 8, tl.minimum(count + count // 4 + 4, CHUNKS))
                bound = reached_by(line_keys, count, enough)
                floor = tl.maximum(floor, bound.to(tl.float32, bitcast=True))
    elif share < 1.0:
        # Weights below (total - wanted) / width sum to less than total - wanted, so the others
        # reach `wanted`. Half of that bound leaves room for rounding.
        spare = (total * (1.0 - 1e-5) - wanted_of(share, total, SHARE)) * 0.5 / width
        floor = tl.maximum(floor, tl.maximum(spare, 0.0).to(tl.float32))
    return bits_of(floor)


@triton.jit
def sample_of(
    x, peak, temp, width, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):  # fmt: skip
    """(The first SAMPLE weights of every chunk of a row at x, relative to the row's largest; the
    number of row elements per sampled one.)"""
    i = tl.arange(0, CHUNKS * SAMPLE)
    place = i // SAMPLE * CHUNK + i % SAMPLE
    inside = place < width
    # Clamp the index instead of masking: masked loads are issued one after the other.
    value = tl.load(x + tl.minimum(place, width - 1)).to(tl.float32)
    weight = weight_of(value, peak, temp, SOFTMAX)
    if not SOFTMAX:
        weight /= peak
    last = (width - 1) // CHUNK
    stands_for = width / (last * SAMPLE + tl.minimum(width - last * CHUNK, SAMPLE)).to(tl.float32)
    return tl.where(inside, weight, 0.0), stands_for


@triton.jit
def both_added(a, b, c, d):
    """Elementwise sum of two pairs."""
    return a + c, b + d


@triton.jit
def sides_of(weight, stands_for, trial, top, spare, SURE: tl.constexpr):
    """For each trial value [N], as bits: whether the sum of all smaller weights is less than
    `spare`, and whether it is more, each by SURE standard deviations of the sample's estimate.

    weight, stands_for: as returned by `sample_of`; spare: relative to the largest weight, `top`.
    """
    bound = trial.to(tl.float32, bitcast=True) / top
    below = tl.where(weight[None, :] < bound[:, None], weight[None, :], 0.0)
    total, squares = tl.reduce((below, below * below), 1, both_added)
    # Assume one more sample of this weight, so that an empty sample proves nothing.
    off = SURE * tl.sqrt(squares + bound * bound)
    return (total + off) * stands_for <= spare, (total - off) * stands_for >= spare


@triton.jit
def guess_of(weight, stands_for, spare, top, floor, end, SURE: tl.constexpr, TRIALS: tl.constexpr):
    """Bounds, as bits, between which the running sum of weights in ascending order passes `spare`
    according to the sample; floor and end where it does not tell. Tests TRIALS values evenly spaced
    in the interval, then refines twice, half of the trials next to each bound. The other arguments
    are those of `sides_of`."""
    j = tl.arange(0, TRIALS)
    HALF: tl.constexpr = TRIALS // 2
    low, high = floor, end
    step = (end - floor) // TRIALS + 1
    trial = floor + j * step
    for _ in range(3):
        less, more = sides_of(weight, stands_for, trial, top, spare, SURE)
        low = tl.maximum(low, tl.max(tl.where(less, trial, floor), 0))
        high = tl.minimum(high, tl.min(tl.where(more, trial, end), 0))
        step = step // HALF + 1
        trial = tl.where(j < HALF, low + j * step, high - (j - HALF) * step)
    low = tl.minimum(low, end - 1)
    return low, tl.maximum(high, low + 1)


@triton.jit
def bound_of(low, temp, SOFTMAX: tl.constexpr):
    """The lowest value, in the units of `height_of`, whose weight may be >= low (bits), with a
    margin for rounding."""
    weight = low.to(tl.float32, bitcast=True)
    bound = weight
    if SOFTMAX:
        # The margin exceeds the error of exp2 and log2; subnormal weights are rounded.
        bound = (tl.log2(weight) - 1e-3) / tl.div_rn(1.4426950408889634, temp)
        bound = tl.where(low < (1 << 23), float("-inf"), bound)
    return bound


@triton.jit
def height_of(value, peak, SOFTMAX: tl.constexpr):
    """The quantity that weights grow with: logit minus peak, or the probability."""
    return value - peak if SOFTMAX else value
