// How AMX's tiles are configured.
#include <immintrin.h>

#include <cstdint>

namespace qforge {
namespace {

struct TileConfig {  // what LDTILECFG reads
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t columns[16];  // bytes of a row
    uint8_t rows[16];
};

// The thread's tiles, while it lives
class Configured {
  public:
    explicit Configured(const TileConfig &config) { _tile_loadconfig(&config); }
    ~Configured() { _tile_release(); }
    Configured(const Configured &) = delete;
};

// GCC does not know that loads of tiles read what was written before.
inline void written_for_tiles() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace qforge
