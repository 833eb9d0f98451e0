use wasmtime::ResourceLimiter;

/// Bounds what a store may grow to, and remembers that it was refused: a guest that is refused memory usually traps a
/// moment later, and the operator should see the cause.
#[derive(Debug)]
pub(crate) struct Limiter {
    memory_bytes: usize,
    /// Of the memory that there is now.
    taken_bytes: usize,
    /// Bytes that the call under way wanted in vain.
    refused_bytes: Option<usize>,
}

/// A Rust guest has one table of a few dozen functions; far more is an attack.
pub(crate) const MAX_TABLE_ELEMENTS: usize = 20_000;

/// Core instances of one component. A Rust guest has 3; CPython (componentize-py) one for each shared library, 38 modules
/// in 45 instances.
pub(crate) const MAX_CORE_INSTANCES: usize = 64;

impl Limiter {
    pub(crate) fn new(memory_bytes: usize) -> Self {
        Self { memory_bytes, taken_bytes: 0, refused_bytes: None }
    }

    /// A new call begins: what was refused before is not its cause.
    pub(crate) fn forget(&mut self) {
        self.refused_bytes = None;
    }

    /// What was refused, and the limit, in one line; `None` when nothing was.
    pub(crate) fn refusal(&self) -> Option<String> {
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        let wanted = mib(self.refused_bytes?);
        Some(format!("needs {wanted} MiB of memory, expected at most memory_mib, {}", mib(self.memory_bytes)))
    }

    /// Bytes of linear memory, touched or not.
    pub(crate) fn taken_bytes(&self) -> usize {
        self.taken_bytes
    }
}

impl ResourceLimiter for Limiter {
    fn memory_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        let allowed = desired <= self.memory_bytes;
        if allowed {
            self.taken_bytes = desired;
        } else {
            self.refused_bytes = Some(desired);
        }
        Ok(allowed)
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        Ok(desired <= MAX_TABLE_ELEMENTS)
    }

    fn instances(&self) -> usize {
        MAX_CORE_INSTANCES
    }

    fn tables(&self) -> usize {
        8
    }

    fn memories(&self) -> usize {
        1
    }
}
