// Where native work runs: a thread pool, the instruction set that this CPU has, and each thread's scratch memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "qforge/linear.h"
#include "qforge/pool.h"

namespace qforge {

struct Free {
    void operator()(float *p) const;
};
using Scratch = std::unique_ptr<float[], Free>;

class Context {
  public:
    Context(int threads, const std::string &isa);  // isa: a name that instruction_sets() lists; throws std::invalid_argument for others

    // y [rows][columns] = x [rows][weight.inputs()] W^T + bias; x_stride and y_stride in floats
    void linear(const Weight &weight, const float *x, int64_t rows, int64_t x_stride, float *y, int64_t y_stride);
    int threads() const { return pool_.threads(); }
    const std::string &isa() const { return isa_; }

    static std::vector<std::string> instruction_sets();  // those that this CPU runs, fastest first

  private:
    float *scratch(int thread, int64_t floats);

    Pool pool_;
    std::string isa_;
    LinearPiece piece_;
    std::vector<Scratch> scratch_;
    std::vector<int64_t> scratch_floats_;
};

}  // namespace qforge
