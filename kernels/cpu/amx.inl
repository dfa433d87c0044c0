// Groups of 16 rows, which AMX's tiles take, and the panels that they are multiplied with.
#include <algorithm>

#include "amx_config.inl"
#include "vnni_512.inl"

namespace qforge {
namespace {

constexpr int64_t kRows = 16, kMostRows = 256;  // of a group; of a task: the more share a panel, the less its unpacking costs

// Of so many rows, those that groups of 16 take: up to 7 more than whole groups are faster without.
inline int64_t rows_of_groups(int64_t rows) { return rows % kRows < 8 ? rows / kRows * kRows : rows; }

// Calls run(first row, how many) for groups of 16. Tiles are always whole: of up to 15 rows after the last one, what is multiplied with can be read.
template <typename F>
void for_groups(int64_t row, int64_t row_end, const F &run) {
    written_for_tiles();
    for (; row < row_end; row += kRows) run(row, std::min(kRows, row_end - row));
}

// Bytes of a tile's codes, one each
inline int64_t panel_bytes(const Weight &w) { return w.inputs() * kTile; }

// Bytes around 128 -> around 0
inline void to_signed(const uint8_t *from, int64_t count, int8_t *to) {
    for (int64_t i = 0; i < count; i += 64) _mm512_store_si512(to + i, _mm512_xor_si512(_mm512_loadu_si512(from + i), _mm512_set1_epi8(static_cast<char>(128))));
}

}  // namespace
}  // namespace qforge
