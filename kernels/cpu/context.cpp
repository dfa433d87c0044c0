// Run-time dispatch and the splitting of products into tasks.
#include "qforge/context.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#ifdef QFORGE_HAVE_AVX2
#include "qforge/processor.h"
#endif

#ifdef __linux__
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qforge {
namespace {

// Rows of a task: whole register tiles, of so many rows, in nearly equal tasks
int64_t whole_chunks(int64_t rows, int64_t tile_rows, int64_t most) {
    const int64_t chunks = std::max<int64_t>(1, (rows + most - 1) / most);
    return std::max<int64_t>(1, ((rows + chunks - 1) / chunks + tile_rows - 1) / tile_rows) * tile_rows;
}

#ifdef QFORGE_HAVE_AVX2
// Whether there are tiles of bytes and of bf16, with what makes bf16 (no CPU has but some of it), and the system lets this process have them
bool has_amx() {
#ifdef __linux__
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM (Documentation/arch/x86/xstate.rst)
    static const bool granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("avx512bf16") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}
#endif

#ifdef QFORGE_HAVE_NEON
// Whether there are dot products of bytes, which ARM processors have from 2018 on, older and cheaper ones not
bool has_dot_products() {
#ifdef __linux__
    return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
    return false;  // nobody has looked yet how other systems are asked
#endif
}
#endif

bool blockwise(const Weight &w) { return w.activations == Activations::INT8 || w.activations == Activations::INT16; }

// The segment that begins at an input
int64_t segment_at(const Weight &w, int64_t input) { return input / w.block_k * segments_of_block(w) + input % w.block_k / segment_inputs(w); }

constexpr int64_t kStrip = kWideTiles * kTile;  // columns of a strip
constexpr int64_t kGatedRows = 33;              // fewer take no less time with gates at once (16 and 24 rows 1 % more), and 1 to 4 rows read two streams of weights 10 % slower than one

// Inputs that one thread has to round: whole segments, and whole blocks where these have sums or shorter segments
int64_t rounded_by_one(const Weight &w) { return w.zero < 0 || w.block_k % segment_inputs(w) ? w.block_k : segment_inputs(w); }

// Positions of an attention piece
int64_t queries_of_piece(const Attention &a) { return std::max<int64_t>(1, 8 * kQueryRows * a.cache.kv_heads / a.heads); }

}  // namespace

std::vector<std::string> Context::instruction_sets() {
    std::vector<std::string> found;
#ifdef QFORGE_HAVE_AVX2
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
            if (has_amx()) found.push_back("amx");
            // Zen adds twice as many vectors as it multiplies; Intel's processors do both in the same ports
            const bool more_adders = __builtin_cpu_is("amd");
            if (more_adders) found.push_back("avx512-vnni-pairs");
            found.push_back("avx512-vnni");
            if (!more_adders) found.push_back("avx512-vnni-pairs");
        }
        if (__builtin_cpu_supports("avxvnni")) found.push_back("avx-vnni");
        found.push_back("avx2");
    }
#endif
#ifdef QFORGE_HAVE_NEON
    if (has_dot_products()) found.push_back("neon-dotprod");
#endif
    found.push_back("portable");
    return found;
}

Context::Context(int threads, const std::string &isa) : pool_(threads), isa_(isa), few_rows_(linear_portable), many_rows_(linear_portable), layers_(&layers_portable), integer_(&integer_portable), blockwise_(&blockwise_portable), bf16_(&bf16_portable), scratch_(threads), cache_ahead_(threads) {
    const auto sets = instruction_sets();
    if (std::find(sets.begin(), sets.end(), isa) == sets.end()) throw std::invalid_argument("this CPU does not run the instruction set " + isa);
#ifdef QFORGE_HAVE_AVX2
    if (isa != "portable") {
        const bool amx = isa == "amx", pairs = isa == "avx512-vnni-pairs", avx512 = amx || pairs || isa == "avx512-vnni";
        few_rows_ = avx512 ? linear_avx512 : linear_avx2;
        many_rows_ = avx512 && !is_zen4() ? linear_avx512 : linear_avx2;  // a Zen 4 multiplies floats no wider with AVX-512: 128 rows take 1.11 of AVX2's time, one row .87
        layers_ = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512dq") ? &layers_avx512 : &layers_avx2;
        weight_sum_ = layers_ == &layers_avx512 ? weight_sum_avx512 : weight_sum_avx2;
        if (amx && layers_ == &layers_avx512) tiles_ = &tile_attention_amx;
        integer_ = amx ? &integer_amx : avx512 ? &integer_avx512_vnni : &integer_avx2;
        if (amx) bf16_ = &bf16_amx;
        blockwise_ = amx ? &blockwise_amx : pairs ? &blockwise_avx512_pairs : avx512 ? &blockwise_avx512_vnni : isa == "avx-vnni" ? &blockwise_avx_vnni : &blockwise_avx2;
    }
#endif
#ifdef QFORGE_HAVE_NEON
    if (isa != "portable") {  // all else is plain C++, which the compiler writes with NEON where it can
        few_rows_ = many_rows_ = linear_neon;
        blockwise_ = &blockwise_neon;
    }
#endif
}

void Context::grow_scratch(int64_t bytes) {
    if (bytes <= scratch_bytes_) return;
    scratch_bytes_ = 0;
    for (Scratch &s : scratch_) s = take_floats((bytes + 3) / 4);
    scratch_bytes_ = bytes;
}

// Calls run(row, row_end, tile, tile_end, thread) for pieces of a product.
template <typename F>
void Context::split_product(int64_t tiles, int64_t rows, const Cut &cut, const F &run) {
    struct Job {
        const F *run;
        int64_t rows, tiles, tile_tasks;
        Cut cut;
    };
    const int64_t tile_tasks = (tiles + cut.tiles - 1) / cut.tiles, row_tasks = rows ? (rows + cut.rows - 1) / cut.rows : 0;
    Job job{&run, rows, tiles, tile_tasks, cut};
    pool_.run(
        static_cast<int>(tile_tasks * row_tasks),
        [](void *context, int task, int thread) {
            const auto &j = *static_cast<Job *>(context);
            const int64_t row = task / j.tile_tasks * j.cut.rows, tile = task % j.tile_tasks * j.cut.tiles;
            (*j.run)(row, std::min(row + j.cut.rows, j.rows), tile, std::min(tile + j.cut.tiles, j.tiles), thread);
        },
        &job);
}

// Tasks of products that unpack blocks into panels where there are many rows.
Context::Cut Context::cut_panels(const Weight &weight, int64_t rows) const {
    if (rows <= 2 * kFewRows)  // twice through packed weights is still faster than a panel that only 8 rows share: 1060 against 1220 us at 2048 x 2048
        return {rows <= kFewRows ? rows : (rows + 1) / 2, std::max<int64_t>(2, weight.tiles() / (threads() * 16) / 2 * 2)};
    return {whole_chunks(rows, 6, kRowChunk), kWideTiles};
}

// Tasks of products that go over strips of packed weights. in_registers: whether weights are unpacked for each few rows anew, so that tasks may as well share them.
Context::Cut Context::cut_strips(int64_t tiles, int64_t rows, int64_t tile_rows, int64_t most_rows, bool in_registers) const {
    if (rows <= kFewRows)  // long tasks, which memory feeds as one stream
        return {kFewRows, std::max<int64_t>(kWideTiles, tiles / (threads() * 16) / kWideTiles * kWideTiles)};
    if (rows > most_rows) return {whole_chunks(rows, tile_rows, most_rows), kWideTiles};
    // Half of the threads take half of the rows, not of the columns: what a row becomes then stays near its thread, also where threads have no cache in common (24 and 32 rows
    // on two chiplets: 19.9 -> 18.4 and 26 -> 24 ms; on one: the same)
    if (in_registers && threads() > 1 && rows >= 4 * kFewRows) return {((rows + 1) / 2 + kFewRows - 1) / kFewRows * kFewRows, kWideTiles};
    // Where rows make one task a strip, it is as long as leaves 8 to a thread: what comes next is brought meanwhile (a step of 20 rows: 16.4 -> 15.3 ms).
    // Strips so few that threads share them unevenly (36 tiles by fours are 9 tasks for two) are halved.
    const bool few_tasks = tiles < 32 * threads();
    return {whole_chunks(rows, tile_rows, most_rows), few_tasks ? kWideTiles / 2 : std::max<int64_t>(kWideTiles, tiles / (threads() * 8) / kWideTiles * kWideTiles)};
}

// Makes rows where that is asked for, and rounds them while they are near.
template <typename F>
void Context::round_rows(int64_t rows, const Weight &weight, const Rows &before, const F &round) {
    split_rows(rows, worth_handing_over((before ? 4 : 1) * weight.inputs()), [&](int64_t first, int64_t end) {  // to make and to round is four times the work
        constexpr int64_t kNear = 4;  // rows that the first cache still has when they are rounded
        for (int64_t row = first; row < end; row += kNear) {
            const int64_t upto = std::min(row + kNear, end);
            if (before) before(row, upto);
            round(row, upto);
        }
    });
}

void Context::linear(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride, const Rows &before) {
    const auto held = turn();
    if (weight.activations == Activations::BF16) return product_bf16(weight, rounded_bf16(weight, x, rows, x_stride, before), rows, y, y_stride, nullptr);
    if (weight.activations != Activations::F32) return product_blockwise(weight, rounded_blocks(weight, x, rows, x_stride, before), rows, y, y_stride);
    if (before) split_rows(rows, worth_handing_over(weight.inputs()), before);
    grow_scratch(scratch_floats(weight) * static_cast<int64_t>(sizeof(float)));
    split_product(weight.tiles(), rows, cut_panels(weight, rows), [&](int64_t row, int64_t row_end, int64_t tile, int64_t tile_end, int thread) {
        (row_end - row > kFewRows ? many_rows_ : few_rows_)({&weight, x, y, x_stride, y_stride, row, row_end, tile, tile_end}, scratch_[thread].get());
    });
}

RoundedBlocks Context::BlocksRoom::of(const Weight &weight, int64_t rows) {
    const auto grow = [](auto &vector, int64_t size) {
        if (static_cast<int64_t>(vector.size()) < size) vector.resize(static_cast<size_t>(size));
    };
    const int64_t segments = weight.blocks * segments_of_block(weight), whole = (rows + 15) / 16 * 16;  // rows that tiles of 16 read
    rows_ = rows;
    grow(codes_, whole * weight.inputs() * (centered(weight) ? 1 : 2));  // AVX2 keeps words also of codes of one byte
    grow(group_scales_, whole * segments);
    grow(sums_, whole * weight.blocks);
    if (centered(weight)) {
        grow(centered_, whole * segments);
        grow(pairs_, rows * segments);
    } else {
        grow(scales_, rows * segments);
        grow(offsets_, rows * segments * limbs(weight));
    }
    return {codes_.data(), scales_.data(), sums_.data(), group_scales_.data(), offsets_.data(), centered_.data(), pairs_.data(), rows};
}

RoundedBlocks Context::rounded_blocks(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, const Rows &before) {
    const RoundedBlocks rounded = blocks_[0].of(weight, rows);
    const int64_t segments = weight.blocks * segments_of_block(weight);
    round_rows(rows, weight, before, [&](int64_t first, int64_t end) { blockwise_->round_rows(weight, x + first * x_stride, x_stride, rounded, first, end, 0, segments); });
    return rounded;
}

void Context::product_blockwise(const Weight &weight, const RoundedBlocks &rounded, int64_t rows, float *y, int64_t y_stride) {
    if (blockwise_->scratch_bytes) grow_scratch(blockwise_->scratch_bytes(weight));
    split_product(weight.tiles(), rows, cut_strips(weight.tiles(), rows, blockwise_->tile_rows, blockwise_->most_rows, blockwise_->in_registers), [&](int64_t row, int64_t row_end, int64_t tile, int64_t tile_end, int thread) {
        blockwise_->piece({&weight, rounded, y, y_stride, row, row_end, tile, tile_end, &cache_ahead_[static_cast<size_t>(thread)]}, scratch_[thread].get());
    });
}

// A strip of gates beside the one that they are for, whose results are rounded while they are near
void Context::gated_blockwise(const Weight &gate_up, const Weight &down, const RoundedBlocks &x, const RoundedBlocks &to, int64_t rows, Activation activation) {
    constexpr int64_t kNear = 16;  // rows that the first cache still has when they are rounded
    const int64_t tiles = down.inputs() / kTile, unit = std::lcm(kStrip, rounded_by_one(down)) / kTile, room = blockwise_->scratch_bytes ? (blockwise_->scratch_bytes(gate_up) + 63) / 64 * 16 : 0;  // room: floats that the product itself takes
    Cut cut = cut_strips(tiles, rows, blockwise_->tile_rows, blockwise_->most_rows, blockwise_->in_registers);
    cut.tiles = (cut.tiles + unit - 1) / unit * unit;
    grow_scratch((room + (2 * std::min(cut.rows, rows) + kNear) * kStrip) * static_cast<int64_t>(sizeof(float)));
    split_product(tiles, rows, cut, [&](int64_t row, int64_t row_end, int64_t tile, int64_t tile_end, int thread) {
        float *products = scratch_[thread].get() + room, *gated = products + 2 * (row_end - row) * kStrip;  // [rows][gates, what they are for], [kNear][of both]
        const auto multiply = [&](int64_t first, float *y) {
            blockwise_->piece({&gate_up, x, y - row * 2 * kStrip - first * kTile, 2 * kStrip, row, row_end, first, first + kWideTiles, &cache_ahead_[static_cast<size_t>(thread)]}, scratch_[thread].get());
        };
        for (; tile < tile_end; tile += kWideTiles) {
            multiply(tile, products);
            multiply(tiles + tile, products + kStrip);
            for (int64_t r = row; r < row_end; r += kNear) {
                const int64_t upto = std::min(r + kNear, row_end);
                layers_->gate({products + (r - row) * 2 * kStrip, gated, kStrip, activation}, 0, upto - r);
                blockwise_->round_rows(down, gated, kStrip, to, r, upto, segment_at(down, tile * kTile), segment_at(down, (tile + kWideTiles) * kTile));
            }
        }
    });
}

bool Context::gates(const Weight &gate_up, const Weight &down, int64_t rows) const {
    const int64_t half = down.inputs();
    if (gate_up.columns != 2 * half) return false;
    if (blockwise(gate_up) && blockwise(down)) {
        const bool whole = down.block_k % segment_inputs(down) == 0 || kStrip % down.block_k == 0;  // segments of a strip
        return rows >= kGatedRows && whole && half % kStrip == 0 && rounded_by_one(down) <= 2 * kStrip;  // longer blocks would make few tasks
    }
    return bf16_->gates && gate_up.activations == Activations::BF16 && down.activations == Activations::BF16 && half % kTile == 0 && !gate_up.bias;
}

void Context::linear_gated(const Weight &gate_up, const Weight &down, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride, Activation activation, const Rows &before) {
    const auto held = turn();
    if (blockwise(gate_up)) {
        const RoundedBlocks gated = blocks_[1].of(down, rows);
        gated_blockwise(gate_up, down, rounded_blocks(gate_up, x, rows, x_stride, before), gated, rows, activation);
        return product_blockwise(down, gated, rows, y, y_stride);
    }
    const Bf16Rows rounded = rounded_bf16(gate_up, x, rows, x_stride, before), gated = bf16_rows_[1].of(down, rows);
    const Bf16Gate gate{activation, gated, stretches(down)};
    product_bf16(gate_up, rounded, rows, nullptr, 0, &gate);
    product_bf16(down, gated, rows, y, y_stride, nullptr);
}

bool Context::rounds(const Attention &a, const Weight &next) const {
    const int64_t of_piece = a.heads / a.cache.kv_heads * a.cache.head_dim;
    if (next.inputs() != a.heads * a.cache.head_dim) return false;
    return blockwise(next) ? of_piece % rounded_by_one(next) == 0 : next.activations == Activations::BF16 && of_piece % kStretch == 0;
}

void Context::linear_rounded(const Weight &weight, int64_t rows, float *y, int64_t y_stride) {
    const auto held = turn();
    if (blockwise(weight)) {
        if (blocks_[0].rows() != rows) throw std::invalid_argument("attention has rounded another number of rows");  // which may decide how codes are kept
        return product_blockwise(weight, blocks_[0].of(weight, rows), rows, y, y_stride);
    }
    product_bf16(weight, bf16_rows_[0].of(weight, rows), rows, y, y_stride, nullptr);
}

Bf16Rows Context::Bf16Room::of(const Weight &weight, int64_t rows) {
    const int64_t bytes = (rows + kGroupRows - 1) / kGroupRows * stretches(weight) * kTileValues * 2;
    if (bytes > bytes_) {
        bytes_ = 0;
        memory_ = take_floats((bytes + 3) / 4);
        bytes_ = bytes;
    }
    return {reinterpret_cast<uint16_t *>(memory_.get())};
}

Bf16Rows Context::rounded_bf16(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, const Rows &before) {
    const Bf16Rows rounded = bf16_rows_[0].of(weight, rows);
    round_rows(rows, weight, before, [&](int64_t first, int64_t end) { bf16_->round_rows(weight, x, x_stride, rounded, first, end, 0, stretches(weight)); });
    return rounded;
}

void Context::product_bf16(const Weight &weight, const Bf16Rows &rounded, int64_t rows, float *y, int64_t y_stride, const Bf16Gate *gate) {
    grow_scratch(bf16_scratch(weight));
    const int64_t tiles = gate ? weight.tiles() / 2 : weight.tiles();
    Cut cut = cut_strips(tiles, rows, kGroupRows, bf16_rows(weight), false);
    if (bf16_slices(weight, std::min(rows, cut.rows)) > 1) cut.tiles = std::clamp<int64_t>(tiles / (threads() * 4) / kWideTiles * kWideTiles, kWideTiles, kSlicedTiles);  // the more share a slice of activations, the less is brought
    split_product(tiles, rows, cut, [&](int64_t row, int64_t row_end, int64_t tile, int64_t tile_end, int thread) {
        bf16_->piece({&weight, rounded, y, y_stride, row, row_end, tile, tile_end, gate}, scratch_[thread].get());
    });
}

void Context::linear_int8(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float static_scale, float *y, int64_t y_stride, const Rows &before) {
    const auto held = turn();
    const int64_t run = weight.run * weight.block_k;
    codes_.resize(static_cast<size_t>((rows + 15) / 16 * 16 * weight.inputs() * integer_->code_bytes));  // tiles of 16 rows read whole ones
    row_scales_.resize(static_cast<size_t>(rows));
    code_sums_.resize(static_cast<size_t>(rows * weight.blocks / weight.run));
    const RoundedRows rounded{x, x_stride, weight.inputs(), static_scale, run, codes_.data(), row_scales_.data(), code_sums_.data()};
    round_rows(rows, weight, before, [&](int64_t first, int64_t end) { integer_->round_rows(rounded, first, end); });
    if (integer_->scratch_bytes) grow_scratch(integer_->scratch_bytes(weight));
    const Cut cut = integer_->panels ? cut_panels(weight, rows) : cut_strips(weight.tiles(), rows, integer_->tile_rows, integer_->most_rows, !integer_->scratch_bytes);
    split_product(weight.tiles(), rows, cut, [&](int64_t row, int64_t row_end, int64_t tile, int64_t tile_end, int thread) {
        integer_->piece({&weight, codes_.data(), row_scales_.data(), code_sums_.data(), y, y_stride, row, row_end, tile, tile_end, &cache_ahead_[static_cast<size_t>(thread)]}, scratch_[thread].get());
    });
}

uint64_t Context::read(const uint64_t *words, int64_t count) {
    constexpr int64_t kPiece = 1 << 15, kLanes = 16;  // 256 KiB a task; lanes: independent sums, which the compiler keeps in registers
    std::vector<uint64_t> sums(static_cast<size_t>(threads()), 0);
    tasks((count + kPiece - 1) / kPiece, [&](int64_t piece, int thread) {
        const uint64_t *p = words + piece * kPiece, *end = words + std::min(count, (piece + 1) * kPiece);
        uint64_t lanes[kLanes] = {};
        for (; p + kLanes <= end; p += kLanes)
            for (int64_t i = 0; i < kLanes; ++i) lanes[i] += p[i];
        for (; p < end; ++p) lanes[0] += *p;
        for (const uint64_t lane : lanes) sums[static_cast<size_t>(thread)] += lane;
    });
    uint64_t total = 0;
    for (const uint64_t sum : sums) total += sum;
    return total;
}

uint64_t Context::checksum(const uint64_t *words, int64_t count) {
    constexpr int64_t kPiece = 1 << 15, kLanes = 8;  // lanes: a multiplication waits for the one before it
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15;
    const auto mixed = [](uint64_t sum, uint64_t word) { return ((sum ^ word) << 29 | (sum ^ word) >> 35) * kFactor; };
    const int64_t pieces = (count + kPiece - 1) / kPiece;
    std::vector<uint64_t> sums(static_cast<size_t>(pieces));
    tasks(pieces, [&](int64_t piece, int) {
        const uint64_t *p = words + piece * kPiece, *end = words + std::min(count, (piece + 1) * kPiece);
        uint64_t lanes[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
        for (; p + kLanes <= end; p += kLanes)
            for (int64_t i = 0; i < kLanes; ++i) lanes[i] = mixed(lanes[i], p[i]);
        for (; p < end; ++p) lanes[0] = mixed(lanes[0], *p);
        uint64_t sum = 0;
        for (const uint64_t lane : lanes) sum = mixed(sum, lane);
        sums[static_cast<size_t>(piece)] = sum;
    });
    uint64_t total = static_cast<uint64_t>(count);
    for (const uint64_t sum : sums) total = mixed(total, sum);
    return total;
}

void Context::norm(const NormRows &n, int64_t rows) {
    const auto held = turn();
    split_rows(rows, worth_handing_over(n.width), rows_of(n));
}

void Context::gate(const GateRows &g, int64_t rows) {
    const auto held = turn();
    split_rows(rows, worth_handing_over(g.width), rows_of(g));
}

Context::Rows Context::rows_of(const NormRows &n) const {
    return [this, n](int64_t first, int64_t end) { layers_->norm(n, first, end); };
}

Context::Rows Context::rows_of(const ResidualRows &r) const {
    return [this, r](int64_t first, int64_t end) { layers_->residual(r, first, end); };
}

Context::Rows Context::rows_of(const GateRows &g) const {
    return [this, g](int64_t first, int64_t end) { layers_->gate(g, first, end); };
}

void Context::bring(const Attention &a, const int32_t *query_starts, int64_t sequences, int64_t products) {
    const auto held = turn();
    const AttentionTasks all = attention_tasks(a, query_starts, sequences, nullptr, 0);
    const auto count = static_cast<int64_t>(all.starts.size()) - 1;
    for (int64_t t = 0, sequence = 0; t < threads(); ++t) {
        const int64_t first = sequence, end = count * (t + 1) / threads();  // as Pool::run shares tasks
        const auto at = all.starts[static_cast<size_t>(end)];
        sequence = at == all.pieces.size() ? sequences : all.pieces[at].sequence;
        cache_ahead_[static_cast<size_t>(t)] = {a, query_starts, first, sequence, products / threads()};
    }
}

// Heads of the same rows, and tasks of about as many rows, lie side by side: a thread then begins with rows that it makes and reads in products, too (two chiplets: prompts 4 % faster).
Context::AttentionTasks Context::attention_tasks(const Attention &a, const int32_t *query_starts, int64_t sequences, const int64_t *wanted, int64_t num_wanted) const {
    AttentionTasks found;
    const int64_t queries = queries_of_piece(a), together = std::max<int64_t>(1, std::min<int64_t>(queries / a.cache.kv_heads, query_starts[sequences] / (16 * threads())));
    int64_t singles = 0;  // sequences' only queries in the last task
    for (int64_t s = 0, w = 0; s < sequences; ++s) {
        const int64_t first = query_starts[s], end = query_starts[s + 1];
        if (stored_by_task(a, sequences, end - first)) {
            if (singles++ % together == 0) found.starts.push_back(found.pieces.size());
            for (int64_t h = 0; h < a.cache.kv_heads; ++h) found.pieces.push_back({first, end, s, h});
            continue;
        }
        singles = 0;
        const auto add = [&](int64_t from, int64_t upto) {
            for (int64_t q = from; q < upto; q += queries)
                for (int64_t h = 0; h < a.cache.kv_heads; ++h) {
                    found.starts.push_back(found.pieces.size());
                    found.pieces.push_back({q, std::min(q + queries, upto), s, h});
                }
        };
        if (!wanted) {
            add(first, end);
            continue;
        }
        for (; w < num_wanted && wanted[w] < first; ++w) {}
        while (w < num_wanted && wanted[w] < end) {
            const int64_t from = wanted[w++];
            int64_t upto = from + 1;
            for (; w < num_wanted && wanted[w] == upto && upto < end; ++w) ++upto;
            add(from, upto);
        }
    }
    found.starts.push_back(found.pieces.size());
    return found;
}

// What one thread reads of a block lies together, so one task has all heads of a sequence's only query where there are tasks enough, and stores what it brings.
bool Context::stored_by_task(const Attention &a, int64_t sequences, int64_t queries) const { return queries == 1 && (sequences >= 4 * threads() || a.cache.kv_heads == 1); }

void Context::bring_nothing() {
    const auto held = turn();
    std::fill(cache_ahead_.begin(), cache_ahead_.end(), CacheAhead());
}

void Context::attention(const Attention &a, const int32_t *query_starts, int64_t sequences, const Weight *next, const int64_t *wanted, int64_t num_wanted) {
    const auto held = turn();
    bring_nothing();
    const auto store = [&](int64_t first, int64_t end) { layers_->rotate_and_store(a, first, end); };
    const auto clear = [&](int64_t s) {
        const int64_t last = query_starts[s + 1] - 1;
        if (last > query_starts[s] || a.positions[last] % 16 == 0) layers_->clear_after(a, last);  // a tile that an earlier step began is clear already, or holds this sequence's guesses that were wrong
    };
    const auto stored = [&](int64_t s) { return stored_by_task(a, sequences, query_starts[s + 1] - query_starts[s]); };
    for (int64_t s = 0; s < sequences;) {
        const int64_t first = query_starts[s];
        for (; s < sequences && !stored(s); ++s) {}
        split_rows(query_starts[s] - first, worth_handing_over(a.row_stride()), [&](int64_t row, int64_t end) { store(first + row, first + end); });
        for (; s < sequences && stored(s); ++s) {}
    }
    for (int64_t s = 0; s < sequences; ++s)
        if (!stored(s)) clear(s);
    int64_t longest = 0;
    for (int64_t s = 0; s < sequences; ++s) longest = std::max(longest, a.positions[query_starts[s + 1] - 1] + 1);
    int64_t bytes = attention_scratch_floats(a, longest) * static_cast<int64_t>(sizeof(float));
    if (tiles_) bytes = std::max(bytes, tiles_->scratch_bytes(a, longest));
    grow_scratch(bytes);
    const AttentionTasks all = attention_tasks(a, query_starts, sequences, wanted, num_wanted);
    const int64_t width = a.heads * a.cache.head_dim, of_piece = width / a.cache.kv_heads;
    const bool blocks = next && blockwise(*next);
    const RoundedBlocks rounded_blocks = blocks ? blocks_[0].of(*next, query_starts[sequences]) : RoundedBlocks();
    const Bf16Rows rounded_bf16 = next && !blocks ? bf16_rows_[0].of(*next, query_starts[sequences]) : Bf16Rows();
    const auto round = [&](const AttentionPiece &p) {
        const int64_t first = p.kv_head * of_piece, end = first + of_piece;
        if (blocks) blockwise_->round_rows(*next, a.out + p.query * width + first, width, rounded_blocks, p.query, p.query_end, segment_at(*next, first), segment_at(*next, end));
        else bf16_->round_rows(*next, a.out, width, rounded_bf16, p.query, p.query_end, first / kStretch, end / kStretch);
    };
    tasks(static_cast<int64_t>(all.starts.size()) - 1, [&](int64_t task, int thread) {
        for (size_t at = all.starts[static_cast<size_t>(task)]; at < all.starts[static_cast<size_t>(task) + 1]; ++at) {
            const AttentionPiece &piece = all.pieces[at];
            if (piece.kv_head == 0 && stored(piece.sequence)) {
                store(piece.query, piece.query_end);
                clear(piece.sequence);
            }
            const auto attend = tiles_ && tiles_->takes(a, piece) ? tiles_->attend : layers_->attend;
            attend(a, piece, scratch_[thread].get());
            if (next) round(piece);
        }
    });
}

}  // namespace qforge
