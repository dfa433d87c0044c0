// What layers.inl computes with, for AVX2, FMA and F16C.
struct Lanes {
    __m256 v;
    static Lanes load(const float *p) { return {_mm256_loadu_ps(p)}; }
    static Lanes load(const uint16_t *p) { return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))}; }
    static Lanes load(const Fp8 *p) {
        const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
        const __m128i halves = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));  // E4M3's exponent, at a half's place, is 8 too small
        const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(halves, _mm_set1_epi16(0x7fff)), _mm_set1_epi16(0x3f80));
        return {_mm256_cvtph_ps(_mm_or_si128(halves, _mm_and_si128(nan, _mm_set1_epi16(0x4000))))};
    }
    static Lanes set(float x) { return {_mm256_set1_ps(x)}; }
    static Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    static Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.v, b.v)}; }
    static Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.v, b.v)}; }
    static Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.v, b.v)}; }
    static Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.v, b.v)}; }
    static Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.v, b.v)}; }
    static Lanes round(Lanes a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    static Lanes exp_scale(Lanes p, Lanes n) { return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.v), _mm256_slli_epi32(_mm256_cvtps_epi32(n.v), 23)))}; }
    static Lanes keep_above(Lanes x, Lanes limit, Lanes y) { return {_mm256_and_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_GT_OQ), y.v)}; }
    static void to_bf16(Lanes x, void *to) {
        const __m256i bits = _mm256_castps_si256(x.v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        store_halves(_mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16), to);
    }
    static void to_int16(Lanes x, void *to) { store_halves(_mm256_and_si256(_mm256_cvtps_epi32(x.v), _mm256_set1_epi32(0xffff)), to); }
    // the lower halves of eight 32-bit integers whose upper halves are 0
    static void store_halves(__m256i x, void *to) {
        _mm_storeu_si128(static_cast<__m128i *>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08)));
    }
    void store(float *p) const { _mm256_storeu_ps(p, v); }
};

inline uint16_t to_half(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
