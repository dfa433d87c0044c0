// Products with codes of one byte or two that have no middle (blockwise.h), each byte multiplied by itself: for instruction sets that add products of bytes to 32-bit sums. After blockwise_x86.inl, whose V this takes.
namespace qforge {
namespace {

// part = fma(scale of the row's segment, sum, part) for R rows x T tiles; First: part = scale * sum, as if part were 0
template <int L, bool First, int R, int T>
inline __attribute__((always_inline)) void add_segment(V::Floats (&part)[R][T], const V::Sums (&sum)[R * L][T], const float *scales, int64_t stride) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
        const float scale = scales[r * stride];
        for (int t = 0; t < T; ++t) {
            V::Integers whole = sum[r * L][t];
            if constexpr (L == 2) whole = V::join(whole, sum[r * L + 1][t]);
            const V::Floats by = V::spread(scale), value = V::to_floats(whole);
            part[r][t] = First ? V::multiply(by, value) : V::fma(by, value, part[r][t]);
        }
    }
}

template <Format F, int L, bool Z>
struct Product {
    static constexpr int kLimbs = L, kMost = V::kCodeRows<F, L> / L;
    const BlockwisePiece &p;
    AllAhead ahead;

    explicit Product(const BlockwisePiece &piece) : p(piece), ahead(piece.cache) {}
    void begin(const Strip &strip) { ahead.begin(*p.weight, strip); }

    template <int R, int T>
    void compute(int64_t row, int64_t tile) {
        const Weight &w = *p.weight;
        const int64_t inputs = w.inputs(), segments = segments_of_block(w), stride = w.blocks * segments;
        const int8_t *x = p.rounded.codes + row * L * inputs;
        const float *scale = p.rounded.scales + row * stride, *row_sum = p.rounded.sums + row * w.blocks;
        const int32_t *offset = p.rounded.offsets + row * stride * L;
        const uint8_t *chunk[T];
        V::Floats total[R][T];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) total[r][t] = V::spread(0);
        for (int t = 0; t < T; ++t) chunk[t] = chunks_of(w, tile + t);
        const bool brings = ahead.left();
        RowsNear<R * L, 2> near(w, {x, scale, offset}, {R * L * inputs, R * stride * static_cast<int64_t>(sizeof(*scale)), Z ? R * L * stride * static_cast<int64_t>(sizeof(*offset)) : 0});
        for (int64_t b = 0; b < w.blocks; ++b) {
            if (brings) ahead.fetch(R * T * kTile * w.block_k);
            near.touch(x, inputs, w.block_k);
            V::Floats part[R][T];
            if constexpr (!V::kAway)
#pragma GCC unroll 6
                for (int r = 0; r < R; ++r)
                    for (int t = 0; t < T; ++t) part[r][t] = V::spread(0);
            for (int64_t left = w.block_k; left > 0; left -= kSegment, ++scale, offset += L) {
                V::put_away(total);
                if (left < w.block_k) V::put_away(part);
                V::Sums sum[R * L][T];
                start_sums(sum, [&](int c) { return Z ? offset[c / L * stride * L + c % L] : 0; });
                if (left >= kSegment) {  // apart, so that its loop has no end to look for
                    add_chunks<F, false, R * L, T>(sum, chunk, x, inputs, kSegment / 8);
                    x += kSegment;
                } else {
                    add_chunks<F, false, R * L, T>(sum, chunk, x, inputs, left / 8);
                    x += left;
                }
                if (V::kAway && left == w.block_k) add_segment<L, true, R, T>(part, sum, scale, stride);
                else add_segment<L, false, R, T>(part, sum, scale, stride);
            }
            add_block<Z>(total, part, w, tile, b, row_sum);
        }
        store(p, total, row, tile);
    }
};

template <Format F, int L>
void any_zeros(const BlockwisePiece &p) { p.weight->zero < 0 ? all_rows(p, Product<F, L, false>(p)) : all_rows(p, Product<F, L, true>(p)); }

void piece(const BlockwisePiece &p, void *scratch) {
    const Weight &w = *p.weight;
    if (centered(w)) return centered_piece(p, scratch);
    if (w.format == Format::INT4) return any_zeros<Format::INT4, 2>(p);
    limbs(w) == 2 ? any_zeros<Format::INT8, 2>(p) : any_zeros<Format::INT8, 1>(p);
}

}  // namespace
}  // namespace qforge
