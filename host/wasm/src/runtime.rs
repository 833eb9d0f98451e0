use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use meridian_core::file::read_regular;
use meridian_core::signature::{FetchedComponent, signature_path};
use wasmtime::component::{Component, Linker};
use wasmtime::{Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use crate::artifact::Artifact;
use crate::cache::Cache;
use crate::compile::{Compiler, Threads};
use crate::error::{LoadError, one_line};
use crate::instance::StoreState;
use crate::{CompileCommand, PolicyComponent, Signer, TrustedKeys, bulk, check, complexity, read_signature, stack};

/// How often the epoch advances: the grain of every deadline.
pub const EPOCH_TICK: Duration = Duration::from_micros(500);
/// Most ticks that are counted at a time: ten seconds.
const MOST_TICKS: u128 = 20_000;

/// Largest component that is loaded.
pub const MAX_COMPONENT_BYTES: u64 = 32 << 20;

/// Instances alive at a time, over all slots, the candidates that are being tried, and those that are being freed after
/// faults.
const POOLED_INSTANCES: u32 = 32;
/// Core instances alive at a time. Ten of the largest components fit; a small one takes 3. Only those that live take memory.
const POOLED_CORE_INSTANCES: u32 = 640;
/// Of the memory, and of the tables, of an instance that has ended, as much as it touched up to this is overwritten for the next and
/// not given back: a step in which a policy faults waits for a new instance, which is there in half the time.
const KEPT_BYTES: usize = 64 << 10;
/// Largest linear memory of any instance; a slot's own limit may be lower.
pub(crate) const MAX_MEMORY_BYTES: usize = 1 << 30;

/// wasmtime, set up for policies. One a process is enough; cloning shares it.
#[derive(Clone)]
pub struct Runtime {
    engine: Engine,
    cache: Option<Arc<Cache>>,
    compiler: Compiler,
    trusted: Arc<TrustedKeys>,
}

impl Runtime {
    /// Set up wasmtime and start the thread that advances the epoch. `cache_dir` holds compiled components between
    /// processes; `None` compiles every time. Components are compiled on threads of this process.
    ///
    /// # Errors
    /// [`LoadError::Setup`] when the machine cannot run WebAssembly.
    pub fn new(cache_dir: Option<PathBuf>) -> Result<Self, LoadError> {
        let mut config = code_config()?;
        let mut pool = PoolingAllocationConfig::default();
        pool.total_component_instances(POOLED_INSTANCES)
            .total_core_instances(POOLED_CORE_INSTANCES)
            .total_memories(POOLED_INSTANCES)
            .total_tables(POOLED_INSTANCES * 2)
            .max_memory_size(MAX_MEMORY_BYTES)
            .linear_memory_keep_resident(KEPT_BYTES)
            .table_keep_resident(KEPT_BYTES)
            .pagemap_scan(Enabled::Auto);
        config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
        // A fault names its trap. Where in the component it happened would be looked for in the step that it costs.
        config.wasm_backtrace_max_frames(None);
        let engine = Engine::new(&config).or_else(|_| {
            // The pool reserves address space; a machine that limits it (ulimit -v) still gets a working host.
            config.allocation_strategy(InstanceAllocationStrategy::OnDemand);
            Engine::new(&config)
        });
        let engine = engine.map_err(|error| LoadError::Setup { detail: one_line(&error) })?;
        start_ticker(&engine)?;
        let cache = cache_dir.map(|dir| Arc::new(Cache::new(dir)));
        Ok(Self { engine, cache, compiler: Compiler::Thread(Threads::new()), trusted: Arc::default() })
    }

    /// From now on, components are compiled in processes that this command starts, which can be killed. Only Linux has
    /// the limits that they need; elsewhere this changes nothing.
    #[must_use]
    pub fn with_compiler(self, command: CompileCommand) -> Self {
        Self { compiler: Compiler::new(command), ..self }
    }

    /// From now on, with any key, a component is loaded only with a signature by one of them.
    #[must_use]
    pub fn with_trusted_keys(self, keys: TrustedKeys) -> Self {
        Self { trusted: Arc::new(keys), ..self }
    }

    /// Read, check and compile the component in a file. Where keys are trusted, its signature is in the file of
    /// [`signature_path`]; what is verified is what was read, and is what is compiled.
    ///
    /// # Errors
    /// Says what is wrong with the file, its signature or the component.
    pub fn load_file(&self, path: &Path) -> Result<PolicyComponent, LoadError> {
        let failed = |source| LoadError::Read { path: path.display().to_string(), source };
        let Some(bytes) = read_regular(path, MAX_COMPONENT_BYTES).map_err(failed)? else {
            let bytes = path.metadata().map_or(MAX_COMPONENT_BYTES + 1, |metadata| metadata.len());
            return Err(LoadError::TooLarge { bytes, limit: MAX_COMPONENT_BYTES });
        };
        // A file that nobody asks for may be anything.
        if self.trusted.is_empty() {
            return self.load_verified(&bytes, None);
        }
        let beside = signature_path(path);
        let signature =
            read_signature(&beside).map_err(|source| LoadError::Read { path: beside.display().to_string(), source })?;
        let signer = self.verify(&bytes, signature.as_deref(), Some(&beside))?;
        self.load_verified(&bytes, signer)
    }

    /// Check and compile a component that nobody signed.
    ///
    /// # Errors
    /// Says what is wrong with the component.
    pub fn load(&self, bytes: &[u8]) -> Result<PolicyComponent, LoadError> {
        self.load_signed(bytes, None)
    }

    /// Check and compile a component. `signature` is the text that `minisign -S` writes; without trusted keys it is not
    /// looked at.
    ///
    /// # Errors
    /// Says what is wrong with the component or its signature.
    pub fn load_signed(&self, bytes: &[u8], signature: Option<&str>) -> Result<PolicyComponent, LoadError> {
        if bytes.len() as u64 > MAX_COMPONENT_BYTES {
            return Err(LoadError::TooLarge { bytes: bytes.len() as u64, limit: MAX_COMPONENT_BYTES });
        }
        let signer = self.verify(bytes, signature, None)?;
        self.load_verified(bytes, signer)
    }

    /// Check and compile a component of a registry, whose digests were verified. Where keys are trusted, one of them must
    /// have signed the bytes (minisign) or the manifest (cosign).
    ///
    /// # Errors
    /// Says what is wrong with the component or its signatures.
    pub fn load_fetched(&self, fetched: &FetchedComponent) -> Result<PolicyComponent, LoadError> {
        if fetched.bytes.len() as u64 > MAX_COMPONENT_BYTES {
            return Err(LoadError::TooLarge { bytes: fetched.bytes.len() as u64, limit: MAX_COMPONENT_BYTES });
        }
        self.load_verified(&fetched.bytes, self.trusted.signer_of(fetched)?)
    }

    /// Who signed the bytes; `None` when no keys are trusted.
    fn verify(
        &self,
        bytes: &[u8],
        signature: Option<&str>,
        beside: Option<&Path>,
    ) -> Result<Option<Signer>, LoadError> {
        if self.trusted.is_empty() {
            return Ok(None);
        }
        let Some(signature) = signature else {
            let file = beside.map(|path| format!(" in {}", path.display())).unwrap_or_default();
            let expected = format!("a minisign signature{file} by {}", self.trusted.any());
            return Err(LoadError::Unsigned { expected });
        };
        let verified = self.trusted.verify(bytes, signature);
        verified.map(Some).map_err(|problem| LoadError::BadSignature { problem })
    }

    /// Nothing of the component was parsed before this.
    fn load_verified(&self, bytes: &[u8], signer: Option<Signer>) -> Result<PolicyComponent, LoadError> {
        check::header(bytes)?;
        let component = self.compile(bytes)?;
        let slots = check::world(&self.engine, &component)?;
        let wrong_type = |error: wasmtime::Error| LoadError::WrongType { detail: one_line(&error) };
        let linker: Linker<StoreState> = Linker::new(&self.engine);
        let pre = linker.instantiate_pre(&component).map_err(wrong_type)?;
        PolicyComponent::new(self.engine.clone(), pre, slots, bytes, signer).map_err(wrong_type)
    }

    /// From the cache, or surveyed and compiled in bounded time, on a stack of known size: what a caller's thread has
    /// left is not known, and one that runs out ends the process. A late thread puts its result into the cache when it is
    /// done, so another attempt may find it.
    fn compile(&self, bytes: &[u8]) -> Result<Component, LoadError> {
        let entry = self.cache.as_ref().and_then(|cache| cache.entry(&self.engine, bytes));
        if let Some(component) = entry.as_ref().and_then(|entry| entry.load(&self.engine)) {
            return Ok(component);
        }
        let engine = self.engine.clone();
        let load = move |artifact: &Artifact| {
            let component = artifact.component(&engine)?;
            if let Some(entry) = entry {
                entry.store(artifact);
            }
            wasmtime::Result::Ok(component)
        };
        match &self.compiler {
            #[cfg(target_os = "linux")]
            Compiler::Child(children) => {
                let artifact = children.compile(bytes)?;
                // The program of the process may have been replaced by another version.
                load(&artifact).map_err(|error| LoadError::CompileFailed { problem: one_line(&error) })
            }
            Compiler::Thread(threads) => {
                let (engine, bytes) = (self.engine.clone(), bytes.to_vec());
                threads.run(move || {
                    complexity::check(&bytes)?;
                    let loaded =
                        engine.precompile_component(&bytes).and_then(|artifact| load(&Artifact::new(artifact)));
                    loaded.map_err(|error| LoadError::Invalid { detail: one_line(&error) })
                })?
            }
        }
    }
}

/// The settings that decide what code is made, the same in a process that only compiles.
pub(crate) fn code_config() -> Result<Config, LoadError> {
    let mut config = Config::new();
    config.epoch_interruption(true);
    // Same inputs, same decisions: NaN bits are otherwise the one thing that differs between machines.
    config.cranelift_nan_canonicalization(true);
    config.wasm_relaxed_simd(false);
    // Nothing stops a bulk instruction that has begun, so a call is given fuel for the bytes that they may touch.
    config.consume_fuel(true).operator_cost(bulk::costs()?);
    config.max_wasm_stack(stack::GUEST_BYTES);
    Ok(config)
}

/// A deadline without a running ticker never passes, or (epoch 0) passes at once; so the ticker is part of the runtime,
/// and ends when the last clone of the engine is gone.
fn start_ticker(engine: &Engine) -> Result<(), LoadError> {
    let weak = engine.weak();
    let ticker = thread::Builder::new().name("meridian-epoch".into()).spawn(move || {
        wake_on_time();
        let mut last = Instant::now();
        while let Some(engine) = weak.upgrade() {
            for _ in 0..ticks_in(last.elapsed()) {
                engine.increment_epoch();
            }
            last = Instant::now();
            drop(engine);
            thread::sleep(EPOCH_TICK);
        }
    });
    ticker.map(drop).map_err(|error| LoadError::Setup { detail: format!("cannot start the epoch thread: {error}") })
}

/// The ticks to count after this time. On a busy machine the thread wakes late: were that one tick too, every tick would
/// lengthen deadlines by the delay.
fn ticks_in(slept: Duration) -> u128 {
    (slept.as_nanos() / EPOCH_TICK.as_nanos()).clamp(1, MOST_TICKS)
}

/// Ask Linux to wake this thread when it wants to be woken. Unless asked it may wake a thread 50 us late to save power, a
/// tenth of a tick, at every tick. What goes wrong here makes deadlines only a little longer.
fn wake_on_time() {
    let tid = std::fs::read_link("/proc/thread-self").ok().and_then(|link| Some(link.file_name()?.to_owned()));
    if let Some(tid) = tid {
        let _ = std::fs::write(Path::new("/proc").join(tid).join("timerslack_ns"), "1");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_wakes_late_counts_the_ticks_it_missed() {
        let ticks = |us| ticks_in(Duration::from_micros(us));
        assert_eq!([0, 400, 560, 999, 1000, 50_000].map(ticks), [1, 1, 1, 1, 2, 100]);
        assert_eq!(ticks(3_600_000_000), MOST_TICKS);
    }
}
