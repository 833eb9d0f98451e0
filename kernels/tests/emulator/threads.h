// Threads of a grid on the host: each is a coroutine of its own, and they take turns where they wait for each other and
// at atomics and fences, in an order drawn from a seed. A missing barrier is then a wrong answer for some seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

struct Index {
    unsigned x;
};

Index thread_index();
Index block_index();

// Of the block that runs, the same for all its threads; full of nonsense at first.
void *shared_memory(size_t bytes);

// Let others run.
void yield();
// __syncthreads().
void wait_for_block();
// What the thread of the warp gave whose lane differs from this one's by `lanes` (xor).
uint32_t exchange(uint32_t value, unsigned lanes);

// Ends the process with a message when it does not hold: on a device it would be undefined.
void check(bool holds, const char *otherwise);

// Run a grid to its end. `seed` 0 runs threads and blocks in their order, others as they come.
void run_grid(unsigned blocks, unsigned threads, uint64_t seed, const std::function<void()> &kernel);

} // namespace emulator
