//! The one loader of policies: `native:NAME`, a component's file or its bytes, or a component in a registry, started for a
//! slot.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use meridian_core::native::{self, NativeError};
use meridian_core::oci::{OciReference, OciReferenceError};
use meridian_core::signature::FetchedComponent;
use meridian_core::slot::Contender;
use meridian_core::{Budget, Dispatch, Eviction, Policy, PolicySource, SlotConfig, SlotKind, SlotName, Targets};
use meridian_registry::{Limits, Registry, RegistryError, Signatures};
use meridian_wasm::{CompileCommand, GuestKind, LoadError, PolicyComponent, PolicyLimits, Runtime, TrustedKeys};
use thiserror::Error;

/// The reason why a policy is not loaded, in one line.
#[derive(Debug, Error)]
pub enum PolicyError {
    /// No native policy has this name, or it refused its options.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// The component was refused.
    #[error("{}{error}", prefix(at))]
    Component {
        /// Its path; empty for an uploaded component.
        at: String,
        /// The reason.
        error: LoadError,
    },
    /// The reference of a component in a registry was refused.
    #[error(transparent)]
    Reference(#[from] OciReferenceError),
    /// The component was not fetched.
    #[error(transparent)]
    Registry(#[from] RegistryError),
}

// What the registry may deliver and what the host loads is the same.
const _: () = assert!(meridian_registry::MAX_COMPONENT_BYTES == meridian_wasm::MAX_COMPONENT_BYTES);

fn prefix(at: &str) -> String {
    if at.is_empty() { String::new() } else { format!("{at}: ") }
}

impl PolicyError {
    /// Whether the cause is the machine or the registry, and not the policy. A component that took too long to compile is not
    /// transient: each retry would occupy the compiler again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Component { error, .. } => {
                matches!(error, LoadError::CompilerBusy { .. } | LoadError::Setup { .. })
            }
            Self::Registry(error) => error.is_transient(),
            Self::Native(_) | Self::Reference(_) => false,
        }
    }
}

/// Folder of fetched components in the cache.
const FETCHED: &str = "registry";

static COMPILE_COMMAND: OnceLock<CompileCommand> = OnceLock::new();

/// How this process starts another one that compiles a component, which can be killed. Only the program knows: the
/// `meridian` command and the Python package call this first, and a Rust program that embeds an engine should. Without
/// it, components are compiled on threads of this process, where a late one keeps its core and memory until it ends by
/// itself. The first call counts.
///
/// ```no_run
/// use meridian_engine::{CompileCommand, compile_child, set_compile_command};
///
/// // At the start of `main`.
/// if std::env::args().nth(1).as_deref() == Some("compile-component") {
///     std::process::exit(compile_child().into());
/// }
/// set_compile_command(CompileCommand::new("/proc/self/exe", ["compile-component"]));
/// ```
pub fn set_compile_command(command: CompileCommand) {
    let _ = COMPILE_COMMAND.set(command);
}

/// Compiles components. The first one sets up wasmtime; an engine with only native policies needs none.
pub struct Components {
    runtime: Mutex<Option<Runtime>>,
    cache_dir: Option<PathBuf>,
    trusted_keys: TrustedKeys,
    registry: Registry,
}

impl Default for Components {
    /// Without a cache and without trusted keys.
    fn default() -> Self {
        Self::new(None, TrustedKeys::default())
    }
}

impl Components {
    /// `cache_dir` holds fetched and compiled components between processes; `None` fetches and compiles every time. With
    /// any trusted key, a component needs a signature by one of the keys.
    #[must_use]
    pub fn new(cache_dir: Option<PathBuf>, trusted_keys: TrustedKeys) -> Self {
        let made = Self { runtime: Mutex::default(), cache_dir, trusted_keys, registry: Registry::default() };
        made.with_registry_limits(Limits::default())
    }

    /// The same, with other limits of fetches.
    #[must_use]
    pub fn with_registry_limits(self, limits: Limits) -> Self {
        let registry = Registry::new(limits);
        let registry = match &self.cache_dir {
            Some(dir) => registry.with_store(dir.join(FETCHED)),
            None => registry,
        };
        Self { registry, ..self }
    }

    /// The same, which keeps fetched components where an engine with this cache looks for them.
    #[must_use]
    pub fn with_fetched_in(self, cache_dir: &Path) -> Self {
        Self { registry: self.registry.with_store(cache_dir.join(FETCHED)), ..self }
    }

    /// The policy that `source` names: `native:NAME`, a component's path relative to `base_dir`, or a reference with a
    /// digest, whose component is fetched unless the cache has it. Not called on the deciding thread.
    ///
    /// # Errors
    /// The file or reference, and the reason for its refusal. Starting a policy checks the name of a native policy.
    pub fn open(&self, source: &str, base_dir: &Path) -> Result<Origin, PolicyError> {
        let reference = match PolicySource::of(source) {
            PolicySource::Native(name) => return Ok(Origin::native(name)),
            PolicySource::File(path) => return self.file(&base_dir.join(path)),
            PolicySource::Registry(reference) => OciReference::pinned(reference)?,
        };
        match self.open_stored(&reference) {
            Some(origin) => origin,
            None => self.fetched(&self.fetch(&reference)?),
        }
    }

    /// The component that the cache has of a reference with a digest; `None` when it must be fetched, for its bytes or
    /// for a signature. Asks no registry.
    pub fn open_stored(&self, reference: &OciReference) -> Option<Result<Origin, PolicyError>> {
        let origin = self.fetched(&self.registry.stored(reference)?);
        let lacks_signature =
            |error: &LoadError| matches!(error, LoadError::Unsigned { .. } | LoadError::BadSignature { .. });
        match &origin {
            // It may have been signed since.
            Err(PolicyError::Component { error, .. }) if lacks_signature(error) => None,
            _ => Some(origin),
        }
    }

    /// Fetch a component, and its signatures where keys are trusted; blocks as long as the limits allow. What the cache
    /// has of it is not fetched again.
    ///
    /// # Errors
    /// The reference, and why it is not fetched.
    pub fn fetch(&self, reference: &OciReference) -> Result<FetchedComponent, PolicyError> {
        let signatures = if self.trusted_keys.is_empty() { Signatures::Ignore } else { Signatures::Fetch };
        Ok(self.registry.pull(reference, signatures)?)
    }

    /// A component that was fetched.
    ///
    /// # Errors
    /// The reference, and the reason for its refusal.
    pub fn fetched(&self, fetched: &FetchedComponent) -> Result<Origin, PolicyError> {
        let component = self.runtime().and_then(|runtime| runtime.load_fetched(fetched));
        Origin::of(component, fetched.source.clone())
    }

    /// The component in a file.
    ///
    /// # Errors
    /// The file, and the reason for its refusal.
    pub fn file(&self, path: &Path) -> Result<Origin, PolicyError> {
        let component = self.runtime().and_then(|runtime| runtime.load_file(path));
        Origin::of(component, path.display().to_string())
    }

    /// A component from bytes; `source` names their origin, and `signature` is the text that `minisign -S` writes.
    ///
    /// # Errors
    /// The reason for the refusal, without the source.
    pub fn bytes(&self, bytes: &[u8], signature: Option<&str>, source: &str) -> Result<Origin, PolicyError> {
        let component = self.runtime().and_then(|runtime| runtime.load_signed(bytes, signature));
        Ok(Origin { source: source.to_owned(), ..Origin::of(component, String::new())? })
    }

    fn runtime(&self) -> Result<Runtime, LoadError> {
        let mut runtime = self.runtime.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = &*runtime {
            return Ok(runtime.clone());
        }
        let mut made = Runtime::new(self.cache_dir.clone())?.with_trusted_keys(self.trusted_keys.clone());
        if let Some(command) = COMPILE_COMMAND.get() {
            made = made.with_compiler(command.clone());
        }
        *runtime = Some(made.clone());
        Ok(made)
    }
}

/// Limits and targets for every policy of a slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Limits of a component.
    pub limits: PolicyLimits,
    /// The deployment's targets.
    pub targets: Targets,
}

impl Terms {
    /// The terms of a slot of an engine.
    #[must_use]
    pub fn of(slot: &SlotConfig, targets: Targets) -> Self {
        let limits = PolicyLimits {
            deadline: Duration::from_secs_f32(slot.deadline_ms / 1e3),
            memory_bytes: (slot.memory_mib as usize) << 20,
            ..PolicyLimits::default()
        };
        Self { limits, targets }
    }

    /// Terms for a run that no engine waits for, and whose result must not depend on the load of the machine: the slot's memory
    /// and its bytes of bulk instructions, without its deadline.
    #[must_use]
    pub fn unhurried(slot: &SlotConfig, targets: Targets) -> Self {
        let Self { limits, .. } = Self::of(slot, targets);
        let limits =
            PolicyLimits { bulk: Some(limits.deadline), memory_bytes: limits.memory_bytes, ..PolicyLimits::UNHURRIED };
        Self { limits, targets }
    }
}

/// The code of a policy. Policies start from it, each with its own options.
///
/// ```
/// use meridian_core::{Dispatch, MeridianConfig};
/// use meridian_engine::{Components, Terms};
///
/// let config = MeridianConfig::default();
/// let terms = Terms::of(&config.policy.dispatch, config.scheduler.targets());
/// let origin = Components::default().open("native:fcfs", ".".as_ref())?;
/// assert_eq!(origin.start::<Dispatch>(terms, "{}")?.version.name, "fcfs");
/// # Ok::<(), meridian_engine::PolicyError>(())
/// ```
#[derive(Clone)]
pub struct Origin {
    code: Code,
    /// `native:NAME`, a path, or the name that an upload gives itself.
    source: String,
    /// Prefix of errors.
    at: String,
}

#[derive(Clone)]
enum Code {
    Native(String),
    Component(PolicyComponent),
}

impl Origin {
    /// The native policy of this name.
    #[must_use]
    pub fn native(name: &str) -> Self {
        Self { code: Code::Native(name.to_owned()), source: PolicySource::Native(name).to_string(), at: String::new() }
    }

    fn of(component: Result<PolicyComponent, LoadError>, at: String) -> Result<Self, PolicyError> {
        match component {
            Ok(component) => Ok(Self { code: Code::Component(component), source: at.clone(), at }),
            Err(error) => Err(PolicyError::Component { at, error }),
        }
    }

    /// `native:NAME`, or where the component came from.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The component; `None` for a native policy.
    #[must_use]
    pub fn component(&self) -> Option<&PolicyComponent> {
        match &self.code {
            Code::Native(_) => None,
            Code::Component(component) => Some(component),
        }
    }

    /// The slots that its policies fill, at least one.
    ///
    /// # Errors
    /// No slot has a native policy of this name.
    pub fn slots(&self) -> Result<Vec<SlotName>, PolicyError> {
        let name = match &self.code {
            Code::Component(component) => return Ok(component.slots()),
            Code::Native(name) => name.as_str(),
        };
        let natives = [
            (SlotName::Dispatch, Dispatch::NATIVES),
            (SlotName::Eviction, Eviction::NATIVES),
            (SlotName::Budget, Budget::NATIVES),
        ];
        let slots: Vec<_> =
            natives.into_iter().filter(|(_, names)| names.contains(&name)).map(|(slot, _)| slot).collect();
        if slots.is_empty() {
            let known = natives.iter().flat_map(|(_, names)| *names).copied().collect();
            return Err(NativeError::Unknown { name: name.to_owned(), known }.into());
        }
        Ok(slots)
    }

    /// Start a policy of slot `K`. `options` is one JSON object. The call waits for the start, but compiles nothing.
    ///
    /// # Errors
    /// The origin has no policy for the slot, or the policy refused its options or faulted while starting.
    pub fn policy<K: GuestKind>(&self, terms: Terms, options: &str) -> Result<Box<dyn Policy<K>>, PolicyError> {
        match &self.code {
            Code::Native(name) => Ok(native::policy(name, terms.targets, options)?),
            Code::Component(component) => match component.policy::<K>(terms.limits, terms.targets, options) {
                Ok(policy) => Ok(Box::new(policy)),
                Err(error) => Err(PolicyError::Component { at: self.at.clone(), error }),
            },
        }
    }

    /// The same, with the data that a slot needs of a policy.
    ///
    /// # Errors
    /// As [`Origin::policy`].
    pub fn start<K: GuestKind>(&self, terms: Terms, options: &str) -> Result<Contender<K>, PolicyError> {
        Ok(self.contender(self.policy(terms, options)?, terms, options))
    }

    /// The data that a slot needs of a policy that was started from this origin and perhaps wrapped since.
    pub fn contender<K: GuestKind>(&self, policy: Box<dyn Policy<K>>, terms: Terms, options: &str) -> Contender<K> {
        let sha256 = self.component().map_or("", PolicyComponent::sha256);
        let contender = Contender::new(policy, sha256, &self.source).with_options(options);
        if self.component().is_none() {
            return contender;
        }
        // Uploaded options name no file.
        let origin = Self { at: String::new(), ..self.clone() };
        contender.with_remake(Arc::new(move |options: &str| {
            origin.policy(terms, options).map_err(|error| error.to_string())
        }))
    }
}
