// Where native work runs: a thread pool, the instruction set that this CPU has, and each thread's scratch memory.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "qforge/blockwise.h"
#include "qforge/integer.h"
#include "qforge/layers.h"
#include "qforge/linear.h"
#include "qforge/pool.h"

namespace qforge {

struct Free {
    void operator()(float *p) const;
};
using Scratch = std::unique_ptr<float[], Free>;

// Calls from several threads take turns: the pool and the scratch memory serve one of them at a time.
class Context {
  public:
    Context(int threads, const std::string &isa);  // isa: a name that instruction_sets() lists; throws std::invalid_argument for others

    // y [rows][columns] = x [rows][weight.inputs()] W^T + bias, x rounded before as weight.activations says; x_stride and y_stride in floats
    void linear(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride);
    // The same with x rounded to int8 row by row (integer.h), for INT4 and INT8 weights; static_scale 0 lets each row have its own scale
    void linear_int8(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float static_scale, float *y, int64_t y_stride);
    void norm(const NormRows &norm, int64_t rows);
    void gate(const GateRows &gate, int64_t rows);
    // Rotates, writes the cache, and attends for the T tokens of a step; query_starts [sequences + 1]
    void attention(const Attention &attention, int64_t tokens, const int32_t *query_starts, int64_t sequences);
    // Reads memory front to back, each thread its share: how fast weights could come at best. Gives a sum, so that nothing is left out.
    uint64_t read(const uint64_t *words, int64_t count);
    int threads() const { return pool_.threads(); }
    const std::string &isa() const { return isa_; }

    static std::vector<std::string> instruction_sets();  // those that this CPU runs, fastest first

  private:
    struct Cut {  // rows and tiles of a task
        int64_t rows, tiles;
    };

    Cut cut_panels(const Weight &weight, int64_t rows, int64_t scratch_floats);
    void linear_blockwise(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride);
    float *scratch(int thread, int64_t floats);
    template <typename F>
    void split_rows(int64_t rows, int64_t least, const F &run);
    template <typename F>
    void split_product(const Weight &weight, int64_t rows, const Cut &cut, const F &run);

    std::mutex turn_;
    Pool pool_;
    std::string isa_;
    LinearPiece piece_;
    const LayerFunctions *layers_;
    const IntegerFunctions *integer_;
    const BlockwiseFunctions *blockwise_;
    std::vector<int16_t> codes_;  // rounded activations of the product that runs
    std::vector<float> row_scales_;
    std::vector<int8_t> segment_codes_;
    std::vector<float> segment_scales_, block_sums_;
    std::vector<Scratch> scratch_;
    std::vector<int64_t> scratch_floats_;
};

}  // namespace qforge
