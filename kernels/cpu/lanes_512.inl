// What layers.inl and attention.inl compute with, for AVX-512.
struct Lanes {
    __m512 v;
    static Lanes load(const float *p) { return {_mm512_loadu_ps(p)}; }
    static Lanes load(const uint16_t *p) { return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))}; }
    static Lanes load(const Fp8 *p) {
        const __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));  // E4M3's exponent, at a half's place, is 8 too small
        const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, _mm256_set1_epi16(0x7fff)), _mm256_set1_epi16(0x3f80));
        return {_mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x4000))))};
    }
    static Lanes set(float x) { return {_mm512_set1_ps(x)}; }
    static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    static Lanes add(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
    static Lanes sub(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
    static Lanes mul(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
    static Lanes guess_reciprocal(Lanes x) { return {_mm512_castsi512_ps(_mm512_sub_epi32(_mm512_set1_epi32(kReciprocal), _mm512_castps_si512(x.v)))}; }
    static Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
    static Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
    static Lanes max_or_nan(Lanes a, Lanes b) { return {_mm512_castsi512_ps(_mm512_max_epu32(_mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))}; }
    Lanes magnitude() const { return {_mm512_abs_ps(v)}; }
    static Lanes round(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static Lanes exp_scale(Lanes x, Lanes p, Lanes n) { return {_mm512_maskz_scalef_ps(above(x, _mm512_set1_ps(-126.0f)), p.v, n.v)}; }
    static Lanes zero_below(Lanes x, Lanes limit, Lanes y) { return {_mm512_maskz_mov_ps(above(x, limit.v), y.v)}; }
    static Lanes div(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
    static void to_bf16(Lanes x, void *to) {
        const __m512i bits = _mm512_castps_si512(x.v), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        store_halves(_mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16), to);
    }
    static void to_bytes(Lanes x, void *to) { _mm_storeu_si128(static_cast<__m128i *>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }  // the lowest ones of integers
    static void to_int16(Lanes x, void *to) { store_halves(_mm512_cvtps_epi32(x.v), to); }
    void store(float *p) const { _mm512_storeu_ps(p, v); }
    float sum() const {
        __m256 s = _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
        s = _mm256_hadd_ps(s, s);
        s = _mm256_hadd_ps(s, s);
        return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
    }
    // Of each of `count` vectors, four at a time
    static void largest_or_nan(const Lanes *x, int64_t count, float *to) {
        const auto bits = [&](int64_t i) { return _mm512_castps_si512(x[i < count ? i : 0].v); };
        const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epu32(a, b); };
        for (int64_t i = 0; i < count; i += 4) {
            const __m512i ab = larger(_mm512_shuffle_i64x2(bits(i), bits(i + 1), 0x44), _mm512_shuffle_i64x2(bits(i), bits(i + 1), 0xEE));
            const __m512i cd = larger(_mm512_shuffle_i64x2(bits(i + 2), bits(i + 3), 0x44), _mm512_shuffle_i64x2(bits(i + 2), bits(i + 3), 0xEE));
            __m512i v = larger(_mm512_shuffle_i64x2(ab, cd, 0x88), _mm512_shuffle_i64x2(ab, cd, 0xDD));  // vector i + j's in its 128-bit lane j
            v = larger(v, _mm512_shuffle_epi32(v, _MM_PERM_BADC));
            v = larger(v, _mm512_shuffle_epi32(v, _MM_PERM_CDAB));
            alignas(16) float most[4];
            _mm_store_si128(reinterpret_cast<__m128i *>(most), _mm512_castsi512_si128(_mm512_permutexvar_epi32(_mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0), v)));
            for (int64_t j = 0; j < 4 && i + j < count; ++j) to[i + j] = most[j];
        }
    }
    Lanes within(int64_t first, int64_t last, float other) const {
        const uint32_t from = first > 0 ? (first < 16 ? ~0u << first : 0) : ~0u, upto = last < 15 ? (last < 0 ? 0 : (2u << last) - 1) : ~0u;
        return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(from & upto), v)};
    }
    float largest() const { return _mm512_reduce_max_ps(v); }

  private:
    static __mmask16 above(Lanes x, __m512 limit) { return _mm512_cmp_ps_mask(x.v, limit, _CMP_NLE_UQ); }  // NaN is
    static void store_halves(__m512i x, void *to) { _mm256_storeu_si256(static_cast<__m256i *>(to), _mm512_cvtepi32_epi16(x)); }  // the lower ones
};

// Two rows of 16 pairs -> 16 times four side by side
inline __m512i fours(__m512i pairs) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), pairs);
}
