// A CUDA driver for machines without a GPU: the part of the driver's interface that Meridian uses, over threads.h.
// Compiled into a libcuda.so that tests load; nothing else ever does.
//
// What it is stricter about than a GPU, so that tests find what would be a matter of luck there:
// - Work is done as late as possible: only when somebody waits for it, or asks whether it is done; or, with a seed, some
//   of any stream at any call. A missing event is then a wrong answer.
// - Memory is full of nonsense at first, and again when it was freed.
// - Addresses that are not of the device, handles that are none, and calls without a context are refused.
//
// It is long because the interface is: a function of the driver's after the other, a few lines each.
//
// emulator_* are for the tests: seeds, failures, what was called.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../../cuda/entropy.cu"

namespace {

enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
};

using Address = unsigned long long;

struct Stream;

// Something was recorded once the `count`th operation of `stream` is done.
struct Event {
    Stream *stream = nullptr;
    uint64_t count = 0;
};

struct Operation {
    std::function<void()> work;
    // To be awaited first.
    Event after;
};

struct Stream {
    std::deque<Operation> waiting;
    uint64_t done = 0;
    bool captures = false;
    uint64_t last() const { return done + waiting.size(); }
};

struct Function {
    void (*run)(const Params &);
};

struct Memory {
    size_t bytes;
    bool is_device;
};

struct Driver {
    std::mutex lock;
    bool is_initialized = false;
    int devices = 1;
    int retained = 0;
    uint64_t seed = 0;
    uint64_t random = 1;
    std::set<Stream *> streams;
    std::set<Event *> events;
    std::map<Address, Memory> memory;
    Stream legacy;
    std::map<std::string, std::pair<int, int>> failures; // name -> calls that go well first, code
    std::map<std::string, int> calls;
    int context = 0; // its address is the context
    int module = 0;  // likewise
};

Driver &driver() {
    static Driver *one = new Driver;
    return *one;
}

thread_local std::vector<void *> contexts;

void finish(Stream &stream, uint64_t count);

void do_one(Stream &stream) {
    Operation operation = std::move(stream.waiting.front());
    stream.waiting.pop_front();
    if (operation.after.stream != nullptr) {
        finish(*operation.after.stream, operation.after.count);
    }
    if (operation.work) {
        operation.work();
    }
    stream.done++;
}

// Do what `stream` was given up to its `count`th operation.
void finish(Stream &stream, uint64_t count) {
    while (stream.done < count) {
        do_one(stream);
    }
}

uint64_t next_random(Driver &d) {
    d.random ^= d.random << 13;
    d.random ^= d.random >> 7;
    d.random ^= d.random << 17;
    return d.random;
}

// Some of what waits, as a device would while the host goes on.
void do_some(Driver &d) {
    if (d.seed == 0) {
        return;
    }
    std::vector<Stream *> all(d.streams.begin(), d.streams.end());
    all.push_back(&d.legacy);
    for (uint64_t i = next_random(d) % 4; i > 0; i--) {
        Stream *stream = all[next_random(d) % all.size()];
        if (!stream->waiting.empty()) {
            do_one(*stream);
        }
    }
}

// Whether an injected failure is due; counts the call.
int enter(Driver &d, const char *name, bool needs_context = true) {
    d.calls[name]++;
    auto failure = d.failures.find(name);
    if (failure != d.failures.end() && failure->second.first-- == 0) {
        int code = failure->second.second;
        d.failures.erase(failure);
        return code;
    }
    if (!d.is_initialized) {
        return NOT_INITIALIZED;
    }
    if (needs_context && (contexts.empty() || contexts.back() == nullptr)) {
        return INVALID_CONTEXT;
    }
    do_some(d);
    return SUCCESS;
}

#define BEGIN_WITH(needs_context)                                                                                      \
    Driver &d = driver();                                                                                              \
    std::lock_guard<std::mutex> guard(d.lock);                                                                         \
    if (int code = enter(d, __func__, needs_context)) {                                                                \
        return code;                                                                                                   \
    }
#define BEGIN() BEGIN_WITH(true)

Stream *stream_of(Driver &d, void *handle) {
    if (handle == nullptr) {
        return &d.legacy;
    }
    auto found = d.streams.find(static_cast<Stream *>(handle));
    return found == d.streams.end() ? nullptr : *found;
}

Event *event_of(Driver &d, void *handle) {
    auto found = d.events.find(static_cast<Event *>(handle));
    return found == d.events.end() ? nullptr : *found;
}

// The allocation that holds all of it.
const Memory *memory_of(Driver &d, Address address, size_t bytes) {
    auto next = d.memory.upper_bound(address);
    if (next == d.memory.begin()) {
        return nullptr;
    }
    auto &[base, memory] = *--next;
    return address + bytes <= base + memory.bytes ? &memory : nullptr;
}

void spoil(void *at, size_t bytes) {
    // A NaN as f32, bf16 and f16, and an index that no row has.
    std::memset(at, 0xff, bytes);
}

void *allocate(Driver &d, size_t bytes, bool is_device) {
    void *at = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    if (at != nullptr) {
        spoil(at, bytes);
        d.memory[reinterpret_cast<Address>(at)] = {bytes, is_device};
    }
    return at;
}

int release(Driver &d, Address address) {
    auto found = d.memory.find(address);
    if (found == d.memory.end()) {
        return INVALID_VALUE;
    }
    // As on a GPU, what is under way is awaited.
    for (Stream *stream : d.streams) {
        finish(*stream, stream->last());
    }
    finish(d.legacy, d.legacy.last());
    spoil(reinterpret_cast<void *>(address), found->second.bytes);
    std::free(reinterpret_cast<void *>(address));
    d.memory.erase(found);
    return SUCCESS;
}

const std::map<std::string, Function> FUNCTIONS = {
    {"meridian_entropy_f32", {[](const Params &p) { meridian_entropy_f32(p); }}},
    {"meridian_entropy_bf16", {[](const Params &p) { meridian_entropy_bf16(p); }}},
    {"meridian_entropy_f16", {[](const Params &p) { meridian_entropy_f16(p); }}},
};

} // namespace

extern "C" {

int cuInit(unsigned) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    if (int code = enter(d, __func__, false); code != SUCCESS && code != NOT_INITIALIZED) {
        return code;
    }
    d.is_initialized = true;
    return d.devices > 0 ? SUCCESS : NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return SUCCESS;
}

int cuDeviceGetCount(int *count) {
    BEGIN_WITH(false)
    *count = d.devices;
    return SUCCESS;
}

int cuDeviceGet(int *device, int ordinal) {
    BEGIN_WITH(false)
    if (ordinal < 0 || ordinal >= d.devices) {
        return INVALID_DEVICE;
    }
    *device = ordinal;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int) {
    BEGIN_WITH(false)
    switch (attribute) {
    case 16: // multiprocessors
        *value = 4;
        return SUCCESS;
    case 75: // compute capability, major
        *value = 9;
        return SUCCESS;
    case 76: // minor
        *value = 0;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int) {
    BEGIN_WITH(false)
    d.retained++;
    *context = &d.context;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    BEGIN_WITH(false)
    d.retained--;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(void *context) {
    BEGIN_WITH(false)
    if (context != &d.context) {
        return INVALID_CONTEXT;
    }
    contexts.push_back(context);
    return SUCCESS;
}

int cuCtxPopCurrent_v2(void **context) {
    BEGIN()
    *context = contexts.back();
    contexts.pop_back();
    return SUCCESS;
}

int cuCtxGetCurrent(void **context) {
    BEGIN_WITH(false)
    *context = contexts.empty() ? nullptr : contexts.back();
    return SUCCESS;
}

int cuCtxSetCurrent(void *context) {
    BEGIN_WITH(false)
    if (!contexts.empty()) {
        contexts.pop_back();
    }
    contexts.push_back(context);
    return SUCCESS;
}

int cuStreamCreateWithPriority(void **stream, unsigned, int) {
    BEGIN()
    *stream = *d.streams.insert(new Stream).first;
    return SUCCESS;
}

int cuStreamCreate(void **stream, unsigned) {
    BEGIN()
    *stream = *d.streams.insert(new Stream).first;
    return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    BEGIN()
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

int cuStreamDestroy_v2(void *handle) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr || stream == &d.legacy) {
        return INVALID_HANDLE;
    }
    finish(*stream, stream->last());
    // Kept, as events may name it.
    d.streams.erase(stream);
    return SUCCESS;
}

int cuStreamSynchronize(void *handle) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr) {
        return INVALID_HANDLE;
    }
    finish(*stream, stream->last());
    return SUCCESS;
}

int cuStreamIsCapturing(void *handle, int *status) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr) {
        return INVALID_HANDLE;
    }
    *status = stream->captures;
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    BEGIN_WITH(false)
    static thread_local int own = 0; // global
    std::swap(*mode, own);
    return SUCCESS;
}

int cuStreamWaitEvent(void *handle, void *event_handle, unsigned) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    Event *event = event_of(d, event_handle);
    if (stream == nullptr || event == nullptr) {
        return INVALID_HANDLE;
    }
    stream->waiting.push_back({nullptr, *event});
    return SUCCESS;
}

int cuLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr) {
        return INVALID_HANDLE;
    }
    stream->waiting.push_back({[=] { function(data); }, {}});
    return SUCCESS;
}

int cuEventCreate(void **event, unsigned) {
    BEGIN()
    *event = *d.events.insert(new Event).first;
    return SUCCESS;
}

int cuEventDestroy_v2(void *handle) {
    BEGIN()
    Event *event = event_of(d, handle);
    if (event == nullptr) {
        return INVALID_HANDLE;
    }
    d.events.erase(event);
    delete event;
    return SUCCESS;
}

int cuEventRecord(void *handle, void *stream_handle) {
    BEGIN()
    Event *event = event_of(d, handle);
    Stream *stream = stream_of(d, stream_handle);
    if (event == nullptr || stream == nullptr) {
        return INVALID_HANDLE;
    }
    *event = {stream, stream->last()};
    return SUCCESS;
}

int cuEventQuery(void *handle) {
    BEGIN()
    Event *event = event_of(d, handle);
    if (event == nullptr) {
        return INVALID_HANDLE;
    }
    if (event->stream == nullptr || event->stream->done >= event->count) {
        return SUCCESS;
    }
    // So that asking again and again comes to an end.
    do_one(*event->stream);
    return NOT_READY;
}

int cuEventSynchronize(void *handle) {
    BEGIN()
    Event *event = event_of(d, handle);
    if (event == nullptr) {
        return INVALID_HANDLE;
    }
    if (event->stream != nullptr) {
        finish(*event->stream, event->count);
    }
    return SUCCESS;
}

int cuMemAlloc_v2(Address *address, size_t bytes) {
    BEGIN()
    void *at = allocate(d, bytes, true);
    *address = reinterpret_cast<Address>(at);
    return at != nullptr ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFree_v2(Address address) {
    BEGIN()
    return release(d, address);
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned) {
    BEGIN()
    *address = allocate(d, bytes, false);
    return *address != nullptr ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemFreeHost(void *address) {
    BEGIN()
    return release(d, reinterpret_cast<Address>(address));
}

int cuMemHostGetDevicePointer_v2(Address *device, void *host, unsigned) {
    BEGIN()
    const Memory *memory = memory_of(d, reinterpret_cast<Address>(host), 1);
    if (memory == nullptr || memory->is_device) {
        return INVALID_VALUE;
    }
    *device = reinterpret_cast<Address>(host);
    return SUCCESS;
}

int cuPointerGetAttribute(void *value, int attribute, Address address) {
    BEGIN()
    const Memory *memory = memory_of(d, address, 1);
    if (attribute != 9 || memory == nullptr || !memory->is_device) { // 9: ordinal of the device
        return INVALID_VALUE;
    }
    *static_cast<int *>(value) = 0;
    return SUCCESS;
}

int cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *handle) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr || memory_of(d, to, bytes) == nullptr) {
        return INVALID_VALUE;
    }
    // Pinned memory is read when the stream comes to it, and other memory at once.
    if (memory_of(d, reinterpret_cast<Address>(from), bytes) != nullptr) {
        stream->waiting.push_back({[=] { std::memcpy(reinterpret_cast<void *>(to), from, bytes); }, {}});
    } else {
        auto copy = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
        stream->waiting.push_back({[=] { std::memcpy(reinterpret_cast<void *>(to), copy->data(), bytes); }, {}});
    }
    return SUCCESS;
}

int cuMemcpyHtoD_v2(Address to, const void *from, size_t bytes) {
    BEGIN()
    if (memory_of(d, to, bytes) == nullptr) {
        return INVALID_VALUE;
    }
    finish(d.legacy, d.legacy.last());
    std::memcpy(reinterpret_cast<void *>(to), from, bytes);
    return SUCCESS;
}

int cuMemcpyDtoH_v2(void *to, Address from, size_t bytes) {
    BEGIN()
    if (memory_of(d, from, bytes) == nullptr) {
        return INVALID_VALUE;
    }
    finish(d.legacy, d.legacy.last());
    std::memcpy(to, reinterpret_cast<const void *>(from), bytes);
    return SUCCESS;
}

int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void *handle) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr || memory_of(d, to, bytes) == nullptr) {
        return INVALID_VALUE;
    }
    stream->waiting.push_back({[=] { std::memset(reinterpret_cast<void *>(to), value, bytes); }, {}});
    return SUCCESS;
}

int cuModuleLoadData(void **module, const void *image) {
    BEGIN()
    const char *text = static_cast<const char *>(image);
    if (std::strstr(text, ".version") == nullptr || std::strstr(text, "meridian_entropy_bf16") == nullptr) {
        return INVALID_IMAGE;
    }
    *module = &d.module;
    return SUCCESS;
}

int cuModuleUnload(void *) {
    BEGIN()
    return SUCCESS;
}

int cuModuleGetFunction(void **function, void *module, const char *name) {
    BEGIN()
    auto found = FUNCTIONS.find(name);
    if (module != &d.module || found == FUNCTIONS.end()) {
        return NOT_FOUND;
    }
    *function = const_cast<Function *>(&found->second);
    return SUCCESS;
}

int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                   unsigned threads_z, unsigned shared, void *handle, void **parameters, void **extra) {
    BEGIN()
    Stream *stream = stream_of(d, handle);
    if (stream == nullptr || x == 0 || y * z * threads_y * threads_z != 1 || shared != 0 || extra != nullptr) {
        return INVALID_VALUE;
    }
    if (threads != THREADS) {
        return INVALID_VALUE;
    }
    // Parameters are copied at the launch; what they point to is read when the kernel runs.
    Params params = *static_cast<const Params *>(parameters[0]);
    auto run = static_cast<const Function *>(function)->run;
    uint64_t seed = d.seed == 0 ? 0 : next_random(d) | 1;
    stream->waiting.push_back({[=] { emulator::run_grid(x, THREADS, seed, [&] { run(params); }); }, {}});
    return SUCCESS;
}

int cuGetErrorName(int, const char **name) {
    *name = "CUDA_ERROR_OF_THE_EMULATOR";
    return SUCCESS;
}

int cuGetErrorString(int, const char **text) {
    *text = "an error of the emulator";
    return SUCCESS;
}

// ---- For tests -----------------------------------------------------------------------------------------------------

// 0: as late as possible, and threads in their order; others: in an order drawn from it.
void emulator_seed(uint64_t seed) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    d.seed = seed;
    d.random = seed * 0x9e3779b97f4a7c15u + 1;
}

// After `later` more calls that go well, one of `function` fails with `code`.
void emulator_fail(const char *function, int later, int code) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    d.failures[function] = {later, code};
}

// Calls of `function` so far.
int emulator_calls(const char *function) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    return d.calls[function];
}

// Devices from now on; before the first use.
void emulator_devices(int count) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    d.devices = count;
}

// Whether the stream captures a graph.
void emulator_capture(void *stream, int captures) {
    Driver &d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    static_cast<Stream *>(stream)->captures = captures;
}

} // extern "C"
