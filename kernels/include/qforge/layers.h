// What a decoder layer does between its products: norm, rotary embedding and cache write, attention over paged blocks, gated activation, residual sums. Arithmetic in fp32, but for products with a cache in bf16 or int8.
//
// The cache, in blocks of `block_size` tokens (a multiple of 16), in fp32, fp16, bf16, int8 or FP8 (E4M3). A block holds the layers one after the other, a layer its heads, a head
// (what one thread reads of a block lies together, and few huge pages hold what a sequence has in all layers)
//   keys   [block_size / 16][head_dim][16]   16 positions side by side, so that scores of 16 keys are one row of products
//   values [block_size][value_dim]           value_dim: head_dim rounded up to a multiple of 16
//   scales of keys, then of values, fp32 [block_size] each: int8, and fp8 without calibrated scales: a key's (in int8 as it is turned) or value's largest magnitude / 127 or 448
//   bf16 and int8: pairs lie together, of dimensions in keys [..][head_dim / 2][16][2] and of positions in values [block_size / 2][value_dim][2]
//   bf16: queries and the weights of values are rounded to bf16 too; of a pair, the second product is added first, in fp32
//   int8: keys and queries are turned by a Hadamard matrix, queries rounded to 8-bit integers too, the largest of a row 127; the weights of values, times their scales, for each 64 positions, the largest 255
//   fp8: codes stand for number / scale, at most 448
//
// Sums are ordered by place in the row and by absolute position in the sequence, never by how a step was cut: results are equal bit for bit
// whatever else is in the step, however a prompt is cut into steps, and wherever the blocks lie. What a mask hides adds exactly zero (finite values; in int8 any).
#pragma once

#include <cstdint>

namespace qforge {

enum class Activation : int { SILU = 0, GELU_TANH = 1 };

constexpr int32_t kReciprocal = 0x7EF311C7;  // less the bits of a positive number: those of its reciprocal, at most 5.1 % off

enum class CacheType : int { F32 = 0, F16 = 1, I8 = 2, BF16 = 3, F8 = 4 };

struct Bf16 {
    uint16_t bits;
};

struct Fp8 {
    uint8_t bits;
};

struct Cache {  // of one layer
    CacheType type;
    char *memory;         // the layer's part of block 0
    int64_t block_bytes;  // from a block to the next
    int64_t kv_heads, head_dim, block_size;
    bool scaled;                   // whether each key and each value has a scale of its own; in int8 always
    float key_scale, value_scale;  // else those of the layer; 1 but for F8

    int64_t value_dim() const { return (head_dim + 15) / 16 * 16; }
    int64_t number_bytes() const { return type == CacheType::F32 ? 4 : type == CacheType::I8 || type == CacheType::F8 ? 1 : 2; }
    int64_t head_bytes() const { return block_size * ((head_dim + value_dim()) * number_bytes() + (scaled ? 2 * static_cast<int64_t>(sizeof(float)) : 0)); }
    int64_t layer_bytes() const { return kv_heads * head_bytes(); }  // of a block
};

struct NormRows {  // y = x / sqrt(mean(x^2) + eps) * weight, row by row; x as it is without a weight
    const float *x, *weight;
    float *y;
    int64_t width;
    float eps;
};

struct ResidualRows {  // x += y, or x += norm(y) where the family norms what a branch gives; then next = norm(x), or x where it norms nothing before a branch, row by row
    float *x;
    const float *y, *branch_weight, *weight;  // branch_weight: null, or of the branch's norm; weight: null, or of the next branch's
    float *next;
    int64_t width;
    float eps;
};

struct GateRows {  // y[r][i] = act(x[r][i]) * x[r][width + i]
    const float *x;
    float *y;
    int64_t width;
    Activation activation;
};

// One step's queries, keys and values: qkv [T][(heads + 2 kv_heads) head_dim]
struct Attention {
    Cache cache;
    float *qkv;
    float *out;  // [T][heads head_dim]
    int64_t heads, window;  // window: 0 for none, else how many positions a query sees, its own included
    float scale;
    const float *q_norm, *k_norm;  // [head_dim], or of all heads, or null
    float norm_eps;
    const float *cosines, *sines;  // [positions][head_dim / 2]
    const int64_t *positions, *slots;  // [T]
    const int32_t *block_tables;       // [sequences][table_stride]
    int64_t table_stride;
    bool whole_norms = false;  // whether queries, and keys, are normed over all their heads at once

    int64_t row_stride() const { return (heads + 2 * cache.kv_heads) * cache.head_dim; }
};

// Queries [query, query_end) of one sequence, and one key/value head
struct AttentionPiece {
    int64_t query, query_end, sequence, kv_head;
};

constexpr int64_t kLongestIntegerHead = 512;  // dimensions of a head in int8
constexpr int64_t kSpan = 64;                // positions of a cache in int8 whose weights are rounded together
constexpr int kQueryRows = 6, kMostQueryRows = 12;  // query rows (positions x heads of a group) that share each key that is read; at most

inline int64_t whole_tiles(int64_t count) { return (count + 15) / 16 * 16; }

inline int64_t attention_scratch_floats(const Attention &a, int64_t longest_context) {
    return kMostQueryRows * (whole_tiles(longest_context) / 4 * 5 + 2 * whole_tiles(a.cache.head_dim) + longest_context / kSpan + 18);
}

struct LayerFunctions {
    void (*norm)(const NormRows &n, int64_t row, int64_t row_end);
    void (*residual)(const ResidualRows &r, int64_t row, int64_t row_end);
    void (*gate)(const GateRows &g, int64_t row, int64_t row_end);
    void (*rotate_and_store)(const Attention &a, int64_t token, int64_t token_end);  // rotates queries in place, writes rotated keys and values into the cache
    void (*clear_after)(const Attention &a, int64_t token);                          // what a sequence's last token leaves unwritten of its tile of 16 positions
    void (*attend)(const Attention &a, const AttentionPiece &piece, float *scratch);
};

extern const LayerFunctions layers_portable;
extern const LayerFunctions layers_avx2;
extern const LayerFunctions layers_avx512;  // with the dot products of VNNI and BF16 in attention

// The same attention by tiles
struct TileAttention {
    bool (*takes)(const Attention &a, const AttentionPiece &piece);
    int64_t (*scratch_bytes)(const Attention &a, int64_t longest_context);
    void (*attend)(const Attention &a, const AttentionPiece &piece, float *scratch);
};

extern const TileAttention tile_attention_amx;

}  // namespace qforge
