#include "threads.h"

#include <csetjmp>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace emulator {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr unsigned WARP = 32;
// Blocks that run at the same time.
constexpr unsigned RESIDENT = 3;
constexpr size_t MOST_SHARED = 16 << 10;

struct Block;

struct Thread {
    enum class State { Ready, AtBarrier, InExchange, Done };

    // How it begins, and where it goes on.
    ucontext_t beginning;
    jmp_buf place;
    bool has_begun;
    std::unique_ptr<char[]> stack;
    Block *block;
    unsigned index;
    State state;
    uint32_t given;
    uint32_t taken;
    unsigned lanes;
};

struct Block {
    std::vector<Thread> threads;
    alignas(16) unsigned char shared[MOST_SHARED];
    unsigned index = 0;
    bool is_free = true;
};

// One grid at a time in a process; the driver holds a lock.
// Contexts are changed by longjmp: swapcontext asks the kernel for signals each time.
jmp_buf scheduler;
Thread *current = nullptr;
const std::function<void()> *work = nullptr;
uint64_t random_state = 0;

uint64_t next_random() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

void pause(Thread::State state) {
    Thread *thread = current;
    thread->state = state;
    if (_setjmp(thread->place) == 0) {
        _longjmp(scheduler, 1);
    }
}

void go_on(Thread &thread) {
    current = &thread;
    if (_setjmp(scheduler) == 0) {
        if (thread.has_begun) {
            _longjmp(thread.place, 1);
        }
        thread.has_begun = true;
        setcontext(&thread.beginning);
    }
}

void enter() {
    (*work)();
    pause(Thread::State::Done);
}

void begin(Block &block, unsigned index, unsigned threads) {
    block.index = index;
    block.is_free = false;
    for (size_t i = 0; i < MOST_SHARED; i++) {
        block.shared[i] = (unsigned char)(0x5a + i * 37);
    }
    block.threads.resize(threads);
    for (unsigned i = 0; i < threads; i++) {
        Thread &thread = block.threads[i];
        if (!thread.stack) {
            thread.stack.reset(new char[STACK]);
        }
        thread.block = &block;
        thread.index = i;
        thread.state = Thread::State::Ready;
        thread.has_begun = false;
        check(getcontext(&thread.beginning) == 0, "getcontext");
        thread.beginning.uc_stack.ss_sp = thread.stack.get();
        thread.beginning.uc_stack.ss_size = STACK;
        thread.beginning.uc_link = nullptr;
        makecontext(&thread.beginning, enter, 0);
    }
}

// Let those go on for whom all others have come. Whether the block has ended.
bool settle(Block &block) {
    size_t done = 0, at_barrier = 0;
    for (const Thread &thread : block.threads) {
        done += thread.state == Thread::State::Done;
        at_barrier += thread.state == Thread::State::AtBarrier;
    }
    if (done == block.threads.size()) {
        return true;
    }
    if (at_barrier == block.threads.size()) {
        for (Thread &thread : block.threads) {
            thread.state = Thread::State::Ready;
        }
    }
    check(at_barrier == 0 || done == 0, "a barrier that not every thread of the block comes to");
    for (size_t first = 0; first < block.threads.size(); first += WARP) {
        size_t waiting = 0;
        for (size_t i = first; i < first + WARP; i++) {
            waiting += block.threads[i].state == Thread::State::InExchange;
        }
        if (waiting == WARP) {
            for (size_t i = first; i < first + WARP; i++) {
                block.threads[i].taken = block.threads[first + ((i - first) ^ block.threads[i].lanes)].given;
            }
            for (size_t i = first; i < first + WARP; i++) {
                block.threads[i].state = Thread::State::Ready;
            }
        }
    }
    return false;
}

} // namespace

Index thread_index() { return {current->index}; }
Index block_index() { return {current->block->index}; }

void *shared_memory(size_t bytes) {
    check(bytes <= MOST_SHARED, "more shared memory than there is");
    return current->block->shared;
}

void yield() { pause(Thread::State::Ready); }

void wait_for_block() { pause(Thread::State::AtBarrier); }

uint32_t exchange(uint32_t value, unsigned lanes) {
    Thread *thread = current;
    thread->given = value;
    thread->lanes = lanes;
    pause(Thread::State::InExchange);
    return thread->taken;
}

void check(bool holds, const char *otherwise) {
    if (!holds) {
        std::fprintf(stderr, "CUDA emulator: %s\n", otherwise);
        std::abort();
    }
}

void run_grid(unsigned blocks, unsigned threads, uint64_t seed, const std::function<void()> &kernel) {
    check(threads % WARP == 0 && threads > 0, "a block of whole warps");
    static std::vector<Block> resident(RESIDENT);
    work = &kernel;
    random_state = seed * 0x9e3779b97f4a7c15u + 1;
    std::vector<unsigned> order(blocks);
    for (unsigned i = 0; i < blocks; i++) {
        order[i] = i;
    }
    for (unsigned i = blocks; seed != 0 && i > 1; i--) {
        std::swap(order[i - 1], order[next_random() % i]);
    }
    unsigned started = 0, ended = 0;
    while (ended < blocks) {
        for (Block &block : resident) {
            if (block.is_free && started < blocks) {
                begin(block, order[started++], threads);
            }
        }
        bool any = false;
        size_t first = seed == 0 ? 0 : next_random() % RESIDENT;
        for (size_t k = 0; k < RESIDENT; k++) {
            Block &block = resident[(first + k) % RESIDENT];
            if (block.is_free) {
                continue;
            }
            // A turn: every thread that can, once, from anywhere, upwards or downwards; some are left out.
            size_t from = seed == 0 ? 0 : next_random() % threads;
            bool is_down = seed != 0 && next_random() % 2;
            for (size_t i = 0; i < threads; i++) {
                Thread &thread = block.threads[(from + (is_down ? threads - i : i)) % threads];
                if (thread.state != Thread::State::Ready) {
                    continue;
                }
                any = true;
                if (seed != 0 && next_random() % 4 == 0) {
                    continue;
                }
                go_on(thread);
            }
            if (settle(block)) {
                block.is_free = true;
                ended++;
                any = true;
            }
        }
        bool released = false;
        for (Block &block : resident) {
            for (Thread &thread : block.threads) {
                released |= !block.is_free && thread.state == Thread::State::Ready;
            }
        }
        check(any || released || ended == blocks, "threads that wait for each other for ever");
    }
    work = nullptr;
}

} // namespace emulator
