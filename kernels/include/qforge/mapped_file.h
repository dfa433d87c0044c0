// A file in memory: at first as the system has mapped it, so that nothing waits for a copy; later, at the same addresses, as a copy in huge pages. Weights in small pages take up to a sixth more time
// for each token.
#pragma once

#include <cstdint>
#include <memory>

namespace qforge {

class MappedFile {
  public:
    // Raises std::system_error; the file may be closed afterwards
    MappedFile(int file, int64_t bytes);
    ~MappedFile();
    MappedFile(const MappedFile &) = delete;
    MappedFile &operator=(const MappedFile &) = delete;

    const void *data() const;
    // After so many seconds, in a thread that nobody waits for. Whoever reads meanwhile reads the same bytes. Ends early where the system gives
    // no memory, or has less than twice of what is left; once for each file
    void move_later(double seconds);
    // Bytes that have been moved
    int64_t moved() const;

  private:
    struct Room;
    std::shared_ptr<Room> room;  // the thread has it, too
};

}  // namespace qforge
