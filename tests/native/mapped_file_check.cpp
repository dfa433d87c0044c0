// Moves a file of 256 MiB into huge pages, while two threads map memory, write there, and unmap it. Exit code 1: their memory, or the file's bytes, changed; a signal: it was gone.
#include "qforge/mapped_file.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

constexpr int64_t kBytes = int64_t{256} << 20, kOthers = int64_t{1} << 20;
constexpr int kAtOnce = 6;

std::atomic<bool> done{false}, wrong{false};

void map_and_unmap() {
    while (!done) {
        char *mine[kAtOnce];
        for (int i = 0; i < kAtOnce; ++i) {
            mine[i] = static_cast<char *>(mmap(nullptr, kOthers, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
            if (mine[i] == MAP_FAILED) std::abort();
            std::memset(mine[i], i + 1, 4096);
            mine[i][kOthers - 1] = static_cast<char>(i + 1);
        }
        std::this_thread::yield();
        for (int i = 0; i < kAtOnce; ++i) {
            if (mine[i][0] != i + 1 || mine[i][kOthers - 1] != i + 1) wrong = true;
            munmap(mine[i], kOthers);
        }
    }
}

int main(int, char **arguments) {
    const int file = open(arguments[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    std::vector<int64_t> words(kBytes / sizeof(int64_t));
    for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<int64_t>(i) * 0x9E3779B9;
    if (write(file, words.data(), kBytes) != kBytes) return 2;
    std::vector<std::thread> others;
    for (int i = 0; i < 2; ++i) others.emplace_back(map_and_unmap);
    for (int round = std::atoi(arguments[2]); round > 0; --round) {
        qforge::MappedFile mapped(file, kBytes);
        mapped.move_later(0);
        while (mapped.moved() < kBytes) std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (std::memcmp(mapped.data(), words.data(), kBytes) != 0) wrong = true;
    }
    done = true;
    for (std::thread &t : others) t.join();
    return wrong ? 1 : 0;
}
