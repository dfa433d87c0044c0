// Pages of a file are replaced piece by piece: a piece is copied into fresh memory, and mremap(2) puts that memory in the place of the piece. It does so under the lock that page faults take: a thread that
// reads there meanwhile waits, and goes on in the copy.
#include "qforge/mapped_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <thread>

#include <sys/mman.h>

namespace qforge {

namespace {

constexpr int64_t kHugePage = int64_t{1} << 21, kPieces = 256;  // each piece is a mapping of its own, of which a process has 65,530

int64_t up(int64_t n) { return (n + kHugePage - 1) / kHugePage * kHugePage; }

char *up(void *p) { return reinterpret_cast<char *>(up(reinterpret_cast<int64_t>(p))); }

// Memory of whole huge pages, and no byte beside it: what is given back must not be somebody else's by now
struct Reserved {
    int64_t bytes;
    char *first = nullptr;

    Reserved(int64_t whole, int protection) : bytes(whole) {
        void *base = mmap(nullptr, static_cast<size_t>(bytes + kHugePage), protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) return;
        first = up(base);
        const int64_t before = first - static_cast<char *>(base);
        if (before) munmap(base, static_cast<size_t>(before));
        if (before < kHugePage) munmap(first + bytes, static_cast<size_t>(kHugePage - before));
    }
    ~Reserved() {
        if (first) munmap(first, static_cast<size_t>(bytes));
    }
    Reserved(const Reserved &) = delete;
    Reserved &operator=(const Reserved &) = delete;
};

// Bytes that the system has without swapping; -1 where it does not say
int64_t available() {
    int64_t kib = -1;
    if (std::FILE *said = std::fopen("/proc/meminfo", "r")) {
        for (char line[128]; std::fgets(line, sizeof line, said) && std::sscanf(line, "MemAvailable: %" SCNd64, &kib) != 1;) {}
        std::fclose(said);
    }
    return kib < 0 ? kib : kib * 1024;
}

}  // namespace

struct MappedFile::Room {
    Reserved reserved;
    int64_t bytes, piece;
    std::atomic<int64_t> moved{0};
    std::atomic<bool> wanted{true};

    Room(int file, int64_t size) : reserved(up(size), PROT_NONE), bytes(size), piece(std::max(8 * kHugePage, up(size / kPieces))) {
        if (!reserved.first || mmap(reserved.first, static_cast<size_t>(size), PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == MAP_FAILED) throw std::system_error(errno, std::generic_category());
    }

    bool move_piece([[maybe_unused]] int64_t start) {
#if defined(__linux__)
        const int64_t size = std::min(piece, bytes - start), whole = up(size);
        if (const int64_t rest = available(); rest >= 0 && rest < 2 * (bytes - start)) return false;
        Reserved fresh(whole, PROT_READ | PROT_WRITE);
        if (!fresh.first || madvise(fresh.first, static_cast<size_t>(whole), MADV_HUGEPAGE) != 0) return false;
        std::memcpy(fresh.first, reserved.first + start, static_cast<size_t>(size));
        if (mprotect(fresh.first, static_cast<size_t>(whole), PROT_READ) != 0) return false;
        if (mremap(fresh.first, static_cast<size_t>(whole), static_cast<size_t>(whole), MREMAP_MAYMOVE | MREMAP_FIXED, reserved.first + start) == MAP_FAILED) return false;
        fresh.first = nullptr;  // whose memory is there from now on is not known
        return true;
#else
        return false;
#endif
    }
};

MappedFile::MappedFile(int file, int64_t bytes) : room(std::make_shared<Room>(file, bytes)) {}

MappedFile::~MappedFile() { room->wanted = false; }

const void *MappedFile::data() const { return room->reserved.first; }

int64_t MappedFile::moved() const { return room->moved; }

void MappedFile::move_later(double seconds) {
    try {
        std::thread([kept = room, seconds] {
            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
            for (int64_t start = 0; kept->wanted && start < kept->bytes && kept->move_piece(start); start += kept->piece) kept->moved = std::min(start + kept->piece, kept->bytes);
        }).detach();
    } catch (const std::system_error &) {  // no more threads: the file stays as it is mapped
    }
}

}  // namespace qforge
