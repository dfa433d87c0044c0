// Where native work runs: a thread pool, the instruction set that this CPU has, and each thread's scratch memory.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qforge/bf16.h"
#include "qforge/blockwise.h"
#include "qforge/cache_ahead.h"
#include "qforge/integer.h"
#include "qforge/layers.h"
#include "qforge/linear.h"
#include "qforge/memory.h"
#include "qforge/pool.h"
#include "qforge/sampler.h"

namespace qforge {

// Rows of so many numbers that are worth the hand-over to another thread
inline int64_t worth_handing_over(int64_t width) { return 1 + 8192 / width; }

// Calls from several threads take turns: the pool and the scratch memory serve one of them at a time.
class Context {
  public:
    Context(int threads, const std::string &isa);  // isa: a name that instruction_sets() lists; throws std::invalid_argument for others

    // Computes rows [first, end) of what a product takes; see rows_of()
    using Rows = std::function<void(int64_t first, int64_t end)>;

    // y [rows][columns] = x [rows][weight.inputs()] W^T + bias, x rounded before as weight.activations says; x_stride and y_stride in floats; `before`, if any, computes x
    void linear(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride, const Rows &before = {});
    // The same with x rounded to int8 row by row (integer.h), for INT4 and INT8 weights; static_scale 0 lets each row have its own scale
    void linear_int8(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float static_scale, float *y, int64_t y_stride, const Rows &before = {});
    // y = what `down` makes of activation(the first half of gate_up's columns) times the second half; for weights of which gates() is true: in bf16 for any rows, else from so many
    // on that it is faster than the products one by one
    bool gates(const Weight &gate_up, const Weight &down, int64_t rows) const;
    void linear_gated(const Weight &gate_up, const Weight &down, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride, Activation activation, const Rows &before = {});
    void norm(const NormRows &norm, int64_t rows);  // alone, as tests look at them: a step has a product compute their rows
    void gate(const GateRows &gate, int64_t rows);
    Rows rows_of(const NormRows &norm) const;
    Rows rows_of(const ResidualRows &residual) const;
    Rows rows_of(const GateRows &gate) const;
    // Rotates, writes the cache, and attends for the tokens of a step; query_starts [sequences + 1]. A block that one sequence writes, no other one of the step may read.
    // `next`: its results are rounded, too, for a product with that weight, of which rounds() is true: linear_rounded(). `wanted`: rows, rising, whose results somebody will look at (what lies in
    // the others' places is undefined, so not with `next`); null: all
    void attention(const Attention &attention, const int32_t *query_starts, int64_t sequences, const Weight *next = nullptr, const int64_t *wanted = nullptr, int64_t num_wanted = 0);
    bool rounds(const Attention &attention, const Weight &next) const;
    void linear_rounded(const Weight &weight, int64_t rows, float *y, int64_t y_stride);  // rows: as many as attention had; std::invalid_argument
    // Until that attention, or bring_nothing(), products of integers (but AMX's and those that unpack panels) bring the keys and values that it will read, each thread those of the
    // tasks that it begins with where all rows are wanted; `products`: so many of their multiplications are to come.
    void bring(const Attention &attention, const int32_t *query_starts, int64_t sequences, int64_t products);
    void bring_nothing();
    CacheAhead cache_ahead(int thread) const { return cache_ahead_[static_cast<size_t>(thread)]; }
    // Calls run(first, end) for pieces of [0, rows) of at least `least` rows
    template <typename F>
    void rows(int64_t rows, int64_t least, const F &run) {
        const auto held = turn();
        split_rows(rows, least, run);
    }
    // Calls run(i, thread) for each i in [0, count)
    template <typename F>
    void tasks(int64_t count, const F &run) {
        const auto held = turn();
        pool_.run(static_cast<int>(count), [](void *context, int task, int thread) { (*static_cast<const F *>(context))(task, thread); }, const_cast<F *>(&run));
    }
    // For a caller that makes many calls as one
    std::unique_lock<std::recursive_mutex> turn() { return std::unique_lock(turn_); }
    // Reads every byte, and returns their sum as words: what the memory gives, against which a product is measured
    uint64_t read(const uint64_t *words, int64_t count);
    // A number that changes with every word, its place, and the count: tells a damaged file from a whole one, not from a forged one
    uint64_t checksum(const uint64_t *words, int64_t count);
    int threads() const { return pool_.threads(); }
    double exchange() {  // see Pool
        const auto held = turn();
        return pool_.exchange();
    }
    const std::string &isa() const { return isa_; }
    // The instruction set of the code that multiplies `floats`, `bytes`, `bf16`, or `blocks` of integers; throws std::invalid_argument for other products
    std::string code(const std::string &products) const;
    WeightSum weight_sum() const { return weight_sum_; }

    static std::vector<std::string> instruction_sets();  // those that this CPU runs, fastest first

  private:
    struct Cut {  // rows and tiles of a task
        int64_t rows, tiles;
    };

    Cut cut_panels(const Weight &weight, int64_t rows) const;
    Cut cut_strips(int64_t tiles, int64_t rows, int64_t tile_rows, int64_t most_rows, bool in_registers) const;
    void product_blockwise(const Weight &weight, const RoundedBlocks &rounded, int64_t rows, float *y, int64_t y_stride);
    void gated_blockwise(const Weight &gate_up, const Weight &down, const RoundedBlocks &x, const RoundedBlocks &to, int64_t rows, Activation activation);
    RoundedBlocks rounded_blocks(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, const Rows &before);
    Bf16Rows rounded_bf16(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, const Rows &before);
    void product_bf16(const Weight &weight, const Bf16Rows &rounded, int64_t rows, float *y, int64_t y_stride, const Bf16Gate *gate);
    void grow_scratch(int64_t bytes);  // of each thread, whose contents are lost
    // A piece must be worth the hand-over to another thread.
    template <typename F>
    void split_rows(int64_t rows, int64_t least, const F &run) {
        struct Job {
            const F *run;
            int64_t rows, step;
        };
        const int64_t step = std::max(least, (rows + threads() * 4 - 1) / (threads() * 4));
        Job job{&run, rows, step};
        pool_.run(
            static_cast<int>((rows + step - 1) / step),
            [](void *context, int task, int) {
                const auto &j = *static_cast<Job *>(context);
                (*j.run)(task * j.step, std::min(j.rows, (task + 1) * j.step));
            },
            &job);
    }
    struct AttentionTasks {
        std::vector<AttentionPiece> pieces;
        std::vector<size_t> starts;  // of tasks, in pieces, and the end
    };
    AttentionTasks attention_tasks(const Attention &attention, const int32_t *query_starts, int64_t sequences, const int64_t *wanted, int64_t num_wanted) const;
    bool stored_by_task(const Attention &attention, int64_t sequences, int64_t queries) const;
    template <typename F>
    void round_rows(int64_t rows, const Weight &weight, const Rows &before, const F &round);
    template <typename F>
    void split_product(int64_t tiles, int64_t rows, const Cut &cut, const F &run);

    std::recursive_mutex turn_;
    Pool pool_;
    std::string isa_;
    LinearPiece few_rows_, many_rows_;  // up to kFewRows, and more
    const LayerFunctions *layers_;
    WeightSum weight_sum_ = weight_sum_portable;
    const TileAttention *tiles_ = nullptr;  // null: none
    const IntegerFunctions *integer_;
    const BlockwiseFunctions *blockwise_;
    const Bf16Functions *bf16_;
    template <typename T>
    using Numbers = std::vector<T, Pages<T>>;
    Numbers<int8_t> codes_;  // rounded activations of the product that runs
    Numbers<float> row_scales_;
    Numbers<int32_t> code_sums_;
    class BlocksRoom {
      public:
        RoundedBlocks of(const Weight &weight, int64_t rows);
        int64_t rows() const { return rows_; }  // asked for last

      private:
        int64_t rows_ = 0;
        Numbers<int8_t> codes_;
        Numbers<float> scales_, group_scales_, sums_;
        Numbers<int32_t> offsets_;
        Numbers<CenteredSegment> centered_;
        Numbers<PairedSegment> pairs_;
    };
    class Bf16Room {
      public:
        Bf16Rows of(const Weight &weight, int64_t rows);

      private:
        Scratch memory_;
        int64_t bytes_ = 0;
    };
    BlocksRoom blocks_[2];  // of a product, and of what is made of its gates: rows as wide lie where the same thread had them
    Bf16Room bf16_rows_[2];
    std::vector<Scratch> scratch_;
    int64_t scratch_bytes_ = 0;
    std::vector<CacheAhead> cache_ahead_;
};

}  // namespace qforge
