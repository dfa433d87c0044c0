"""Choose tokens: the most likely one, or one drawn under temperature, top-k, top-p and min-p; the same as qforge/runtime/sampler.py chooses.

Letters: S rows of logits, V vocabulary, N chunks of CHUNK tokens, NP the power of two from N on, R thresholds tried at once.

Tokens are ordered by logit, the likeliest first, equal ones by their place in the vocabulary; every filter keeps a beginning of that order, and the draw falls where the sum of
weights passes a share of the whole. Chunks are sorted by themselves; a threshold's place in the whole is the sum of its places in the chunks, so that a search by thresholds
replaces one long sort.
Weights and sums are fp64, as the reference's. Where the largest logit is not finite (NaN is larger than all others) there is no token: -1.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
THRESHOLDS = tl.constexpr(16)
_SMALLEST = tl.constexpr(-(1 << 31))
_INFINITE = tl.constexpr(0x7F800000)  # the key of infinity; those of NaN are larger
_LEAST = tl.constexpr((0xFF800000 ^ 0x7FFFFFFF) - (1 << 32))  # the key of minus infinity


@triton.jit
def to_key(logits):
    """fp32 -> int32 of the same order; both zeros are one, and so are all NaN, the largest of all: a GPU's sums that are NaN are 0x7FFFFFFF (PTX ISA, add.f32)."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    if INTERPRETED:  # numpy's sums keep a NaN's sign
        bits = tl.where(logits != logits, 0x7FFFFFFF, bits)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def or_none(token, most_key):
    """A token, or -1 where the largest logit's key is that of no finite number."""
    return tl.where((most_key >= _INFINITE) | (most_key <= _LEAST), -1, token)


@triton.jit
def weight_of(keys, most, temperature):
    """exp((logit - most) / temperature) in fp64; keys int64."""
    narrow = tl.minimum(tl.maximum(keys, _SMALLEST), 0x7FFFFFFF).to(tl.int32)
    logits = tl.where(narrow < 0, narrow ^ 0x7FFFFFFF, narrow).to(tl.float32, bitcast=True)
    return tl.exp((logits.to(tl.float64) - most) / temperature)


@triton.jit(do_not_specialize=["vocabulary"])
def sort_chunks(logits, sorted_keys, vocabulary, CHUNK: tl.constexpr):
    """Keys of `logits [S, V]` fp32 in each chunk, largest first: `[S, N, CHUNK]` int32, the last chunk filled up with the smallest number. Grid: (N, S)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHUNK)
    token = chunk * CHUNK + i
    keys = to_key(tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=0.0))
    keys = tl.where(token < vocabulary, keys, _SMALLEST)
    tl.store(sorted_keys + (row * tl.num_programs(0) + chunk) * CHUNK + i, tl.sort(keys, descending=True))


@triton.jit(do_not_specialize=["vocabulary"])
def sum_chunks(sorted_keys, temperatures, sums, vocabulary, CHUNK: tl.constexpr, NP: tl.constexpr):
    """Sums of the weights in each sorted chunk up to each place, `[S, N, CHUNK]` fp64. Grid: (N, S)."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    i, c = tl.arange(0, CHUNK), tl.arange(0, NP)
    first = tl.load(sorted_keys + (row * chunks + c) * CHUNK, mask=c < chunks, other=_SMALLEST)
    most = _logit(tl.max(first, 0))
    temperature = tl.load(temperatures + row).to(tl.float64)
    at = (row * chunks + chunk) * CHUNK + i
    weights = weight_of(tl.load(sorted_keys + at).to(tl.int64), most, tl.where(temperature > 0, temperature, 1.0))
    tl.store(sums + at, tl.cumsum(tl.where(chunk * CHUNK + i < vocabulary, weights, 0.0), 0))


@triton.jit
def _logit(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def uniform(seed, position):
    """[0, 1) in fp64 from two uint64: Philox 4x64 with ten rounds (Salmon et al. 2011) at counter (1, position, 0, 0), as numpy's generator has it."""
    a, b, c, d = tl.full((1,), 1, tl.uint64), position, tl.full((1,), 0, tl.uint64), tl.full((1,), 0, tl.uint64)
    first, second = seed, tl.full((1,), 0, tl.uint64)
    for _ in tl.static_range(10):
        high_a, low_a = tl.umulhi(a, tl.full((1,), 0xD2E7470EE14C6C93, tl.uint64)), a * tl.full((1,), 0xD2E7470EE14C6C93, tl.uint64)
        high_c, low_c = tl.umulhi(c, tl.full((1,), 0xCA5A826395121157, tl.uint64)), c * tl.full((1,), 0xCA5A826395121157, tl.uint64)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first += tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
        second += tl.full((1,), 0xBB67AE8584CAA73B, tl.uint64)
    return (a >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def choose(
    logits, sorted_keys, sums, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, vocabulary, chunks, CHUNK: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """tokens `[S]` int64; temperatures, top_ps, min_ps `[S]` fp64, top_ks `[S]` int64, seeds and positions `[S]` int64 (the bits of uint64). Grid: (S,).

    Four searches over keys, each for the largest one at which tokens that are at least as large satisfy something: as many as top_k; a share top_p of what these weigh; at least
    min_p of the first one's weight; more than the drawn share of what is left. Of equal tokens the first ones are kept, so that a cut is (key, how many of its equals).
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, NP)
    here = c < chunks
    keys = sorted_keys + row * chunks * CHUNK
    weigh = sums + row * chunks * CHUNK
    sizes = tl.where(here, tl.minimum(vocabulary - c * CHUNK, CHUNK), 0)
    most_key = tl.max(tl.load(keys + c * CHUNK, mask=here, other=_SMALLEST), 0)
    least_key = tl.min(tl.load(keys + c * CHUNK + sizes - 1, mask=here, other=0x7FFFFFFF), 0)
    most = _logit(most_key)
    asked = tl.load(temperatures + row)
    temperature = tl.where(asked > 0, asked, 1.0)
    top_k, top_p, min_p = tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row)
    number = tl.sum(uniform(tl.load(seeds + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True), tl.load(positions + row + tl.arange(0, 1)).to(tl.uint64, bitcast=True)), 0)
    kept = tl.sum(tl.load(weigh + c * CHUNK + sizes - 1, mask=here, other=0.0), 0)  # the weight of what is kept
    cut, equals = least_key.to(tl.int64), tl.full((), 0x7FFFFFFF, tl.int64)  # down to this key, and so many of its equals
    place = tl.full((), 0, tl.int64)
    found_key = most_key.to(tl.int64)
    over, over_or_equal = tl.zeros((NP,), tl.int32), sizes
    for stage in range(4):
        if stage == 0:
            wanted = (top_k > 0) & (top_k < vocabulary)
        elif stage == 1:
            wanted = top_p < 1
        elif stage == 2:
            wanted = (min_p > 0) & (weight_of(cut, most, temperature) < min_p)
        else:
            wanted = asked > 0
        if wanted:
            target = tl.where(stage == 1, top_p, number) * kept
            low, high = least_key.to(tl.int64), most_key.to(tl.int64) + 1
            over, over_or_equal = tl.zeros((NP,), tl.int32), sizes  # tokens of a chunk at `high` or above, and at `low` or above
            while high - low > 1:
                step = (high - low + THRESHOLDS - 1) // THRESHOLDS
                r = tl.arange(0, THRESHOLDS)
                threshold = low + (r + 1) * step
                begin = tl.zeros((THRESHOLDS, NP), tl.int32) + over[None, :]
                end = tl.zeros((THRESHOLDS, NP), tl.int32) + over_or_equal[None, :]
                while tl.max(tl.max(end - begin, 1), 0) > 0:
                    middle = (begin + end) // 2
                    unknown = begin < end
                    larger = tl.load(keys + c[None, :] * CHUNK + middle, mask=unknown, other=0) >= threshold[:, None]
                    begin = tl.where(unknown & larger, middle + 1, begin)
                    end = tl.where(unknown & (larger == 0), middle, end)
                begin = tl.where((threshold >= high)[:, None], over[None, :], begin)
                if stage == 0:
                    satisfied = tl.sum(begin, 1) >= top_k
                elif stage == 2:
                    satisfied = weight_of(threshold - 1, most, temperature) < min_p
                else:
                    weight = tl.sum(tl.load(weigh + c[None, :] * CHUNK + begin - 1, mask=begin > 0, other=0.0), 1)
                    satisfied = (weight > target) | ((stage == 1) & (weight >= target))
                passed = tl.sum(((satisfied != 0) & (threshold < high)).to(tl.int32), 0)
                over_or_equal = tl.where(passed > 0, tl.sum(tl.where((r == passed - 1)[:, None], begin, 0), 0), over_or_equal)
                over = tl.where(passed < THRESHOLDS, tl.sum(tl.where((r == passed)[:, None], begin, 0), 0), over)
                high = tl.minimum(high, low + (passed + 1) * step)
                low += passed * step
            above = tl.sum(tl.load(weigh + c * CHUNK + over - 1, mask=over > 0, other=0.0), 0)
            each = weight_of(low, most, temperature)
            count = tl.sum(over_or_equal - over, 0).to(tl.int64)
            if stage == 3:
                found_key = low
                place = tl.maximum(tl.minimum(((target - above) / each).to(tl.int64), count - 1), 0)
                place = tl.where(low == cut, tl.minimum(place, equals - 1), place)
            else:
                if stage == 0:
                    first = top_k - tl.sum(over, 0)
                elif stage == 1:
                    first = tl.ceil((target - above) / each).to(tl.int64)
                else:
                    first = count
                first = tl.maximum(tl.minimum(first, count), tl.where(stage == 2, 0, 1))
                if (low > cut) | ((low == cut) & (first < equals)):
                    cut, equals, kept = low, first, above + first * each
    # the token: in the chunk where the count of those that equal the key passes `place`, the one at that place
    if asked > 0:
        equal = (over_or_equal - over).to(tl.int64)
    else:
        equal = tl.where(tl.load(keys + c * CHUNK, mask=here, other=_SMALLEST) == most_key, CHUNK, 0).to(tl.int64)
        equal = tl.where(here, equal, 0)
    until = tl.cumsum(equal, 0)
    chunk = tl.sum((until <= place).to(tl.int32), 0)
    before = tl.sum(tl.where(c == chunk - 1, until, 0), 0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    there = token < vocabulary
    same = there & (to_key(tl.load(logits + row * vocabulary + token, mask=there, other=0.0)) == found_key.to(tl.int32))
    rank = tl.cumsum(same.to(tl.int64), 0)
    tl.store(tokens + row, or_none(tl.sum(tl.where(same & (rank == place - before + 1), token, 0), 0), most_key).to(tl.int64))


@triton.jit(do_not_specialize=["vocabulary"])
def most_likely(logits, tokens, vocabulary, BLOCK: tl.constexpr):
    """tokens `[S]` int64: the place of the largest logit, the first of equal ones, -1 where it is not finite. Grid: (S,)."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), _SMALLEST, tl.int32)
    at = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + i
        inside = token < vocabulary
        keys = to_key(tl.load(logits + row * vocabulary + token, mask=inside, other=0.0))
        larger = inside & (keys > best)
        best, at = tl.where(larger, keys, best), tl.where(larger, token, at)
    most = tl.max(best, 0)
    first = tl.min(tl.where(best == most, at, 0x7FFFFFFF), 0)
    tl.store(tokens + row, or_none(first, most).to(tl.int64))
