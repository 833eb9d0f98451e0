//! NIXL: reads the memory of peers by its UCX backend. Its library (`libnixl_capi.so` of the wheel `nixl-cu12`) is loaded
//! at run time; without it, [`Nixl::open`] says [`KvFabricError::Unavailable`].
//!
//! ```
//! use meridian_memory::fabric::KvFabricError;
//! use meridian_memory::fabric::nixl::Nixl;
//!
//! let missing = Nixl::open("/nowhere/libnixl_capi.so".as_ref()).err();
//! assert!(matches!(missing, Some(KvFabricError::Unavailable { .. })));
//! ```
#![expect(unsafe_code, reason = "calls into a C library")]

mod ffi;

use std::ffi::{CStr, CString, c_char, c_int};
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use ring::rand::{SecureRandom, SystemRandom};

use self::ffi::{Api, Handle};
use crate::fabric::transfer::locked;
use crate::fabric::{DataPath, FabricKind, KvFabricError, Part, PathPeer, Region, Stop};

/// Between two looks at a transfer: the first and the longest.
const LOOKS: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(320));

/// How long NIXL's progress thread waits for an event, microseconds; it wakes at once when there is one. By NIXL's default it
/// does not wait, and takes a core, or half of one that it shares.
const PROGRESS_US: u64 = 1000;

/// An agent of NIXL with its UCX backend.
pub struct Nixl {
    api: Api,
    /// An agent may be called by one thread at a time.
    agent: Mutex<Agent>,
}

struct Agent {
    handle: Handle,
    backend: Handle,
    /// Names the backend.
    options: Handle,
    /// Registered memory, which must outlive the agent.
    regions: Vec<Arc<Region>>,
}

// SAFETY: the handles are pointers to objects of NIXL, which any thread may use, one at a time: they are behind a lock.
unsafe impl Send for Agent {}

fn error(reason: impl Into<String>) -> KvFabricError {
    KvFabricError::Path { fabric: FabricKind::Nixl, reason: reason.into() }
}

fn done(call: &str, status: c_int) -> Result<(), KvFabricError> {
    if status == ffi::SUCCESS { Ok(()) } else { Err(error(format!("{call}: status {status}"))) }
}

impl Nixl {
    /// Load the library, and start an agent.
    ///
    /// # Errors
    /// [`KvFabricError::Unavailable`] without the library or its UCX backend.
    pub fn open(library: &Path) -> Result<Arc<Self>, KvFabricError> {
        let unavailable = |reason: String| KvFabricError::Unavailable { fabric: FabricKind::Nixl, reason };
        let api = Api::load(library).map_err(|reason| unavailable(format!("{}: {reason}", library.display())))?;
        let mut random = [0_u8; 8];
        SystemRandom::new().fill(&mut random).map_err(|_| unavailable("the system has no random numbers".into()))?;
        let name = format!("meridian-{:016x}", u64::from_le_bytes(random));
        let agent = Agent::start(&api, &name).map_err(|error| unavailable(error.to_string()))?;
        Ok(Arc::new(Self { api, agent: Mutex::new(agent) }))
    }

    fn agent(&self) -> MutexGuard<'_, Agent> {
        locked(&self.agent)
    }
}

impl Agent {
    fn start(api: &Api, name: &str) -> Result<Self, KvFabricError> {
        let name = CString::new(name).expect("letters and digits");
        let mut handle = ptr::null_mut();
        let config = ffi::AgentConfig {
            has_progress_thread: true,
            has_listener: false,
            zero: [0; 14],
            progress_us: PROGRESS_US,
            listener_us: 0,
            has_telemetry: false,
        };
        // SAFETY: the text ends with a zero, and configuration and handle have a place.
        let status = unsafe { (api.create_configured_agent)(name.as_ptr(), &config, &mut handle) };
        done("create_configured_agent", status)?;
        let mut agent = Self { handle, backend: ptr::null_mut(), options: ptr::null_mut(), regions: Vec::new() };
        match agent.add_backend(api) {
            Ok(()) => Ok(agent),
            Err(error) => {
                agent.end(api);
                Err(error)
            }
        }
    }

    fn add_backend(&mut self, api: &Api) -> Result<(), KvFabricError> {
        let (mut memories, mut parameters) = (ptr::null_mut(), ptr::null_mut());
        let ucx = c"UCX".as_ptr();
        // SAFETY: the agent lives, the text ends with a zero, and both results have a place.
        let status = unsafe { (api.get_plugin_params)(self.handle, ucx, &mut memories, &mut parameters) };
        done("get_plugin_params of UCX (is NIXL_PLUGIN_DIR set to the plugins of the wheel?)", status)?;
        // SAFETY: as above; the parameters are NIXL's own, and are freed after their only use.
        let status = unsafe {
            let status = (api.create_backend)(self.handle, ucx, parameters, &mut self.backend);
            (api.destroy_mem_list)(memories);
            (api.destroy_params)(parameters);
            status
        };
        done("create_backend of UCX", status)?;
        // SAFETY: the result has a place.
        done("create_opt_args", unsafe { (api.create_opt_args)(&mut self.options) })?;
        // SAFETY: both handles live.
        done("opt_args_add_backend", unsafe { (api.opt_args_add_backend)(self.options, self.backend) })
    }

    fn end(&mut self, api: &Api) {
        // SAFETY: each handle is destroyed once, those that name others first; a null handle is refused.
        unsafe {
            (api.destroy_opt_args)(self.options);
            (api.destroy_agent)(self.handle);
            (api.destroy_backend)(self.backend);
        }
    }
}

impl Drop for Nixl {
    fn drop(&mut self) {
        let agent = self.agent.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        agent.end(&self.api);
    }
}

/// A list of memory, destroyed with its last use.
struct List<'a> {
    api: &'a Api,
    handle: Handle,
}

impl<'a> List<'a> {
    fn new(api: &'a Api, blocks: impl Iterator<Item = (u64, u32)>) -> Result<Self, KvFabricError> {
        let mut handle = ptr::null_mut();
        // SAFETY: the result has a place.
        done("create_xfer_dlist", unsafe { (api.create_xfer_dlist)(ffi::DRAM, &mut handle, false) })?;
        let list = Self { api, handle };
        for (address, bytes) in blocks {
            // SAFETY: the list lives. The address is a number to it.
            let status = unsafe { (api.xfer_dlist_add_desc)(handle, address as usize, bytes as usize, 0) };
            done("xfer_dlist_add_desc", status)?;
        }
        Ok(list)
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: created in `new`, and destroyed once.
        unsafe { (self.api.destroy_xfer_dlist)(self.handle) };
    }
}

impl DataPath for Nixl {
    fn kind(&self) -> FabricKind {
        FabricKind::Nixl
    }

    fn register(&self, region: &Arc<Region>) -> Result<(), KvFabricError> {
        let api = &self.api;
        let mut agent = self.agent();
        let mut list = ptr::null_mut();
        // SAFETY: the result has a place.
        done("create_reg_dlist", unsafe { (api.create_reg_dlist)(ffi::DRAM, &mut list, false) })?;
        let address = region.address() as usize;
        // SAFETY: the list lives; the memory is the region's, which is kept for as long as the agent.
        let status = unsafe {
            let mut status = (api.reg_dlist_add_desc)(list, address, region.bytes(), 0, ptr::null(), 0);
            if status == ffi::SUCCESS {
                status = (api.register_mem)(agent.handle, list, agent.options);
            }
            (api.destroy_reg_dlist)(list);
            status
        };
        done("register_mem", status)?;
        agent.regions.push(Arc::clone(region));
        Ok(())
    }

    fn rights(&self) -> Result<Vec<u8>, KvFabricError> {
        let agent = self.agent();
        let (mut data, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: the agent lives, and both results have a place.
        done("get_local_md", unsafe { (self.api.get_local_md)(agent.handle, &mut data, &mut bytes) })?;
        if data.is_null() {
            return Err(error("get_local_md: no data"));
        }
        // SAFETY: NIXL returned so many bytes, of `malloc`, which are freed once.
        let rights = unsafe {
            let rights = std::slice::from_raw_parts(data.cast::<u8>(), bytes).to_vec();
            libc::free(data);
            rights
        };
        let most = crate::fabric::wire::MAX_RIGHTS_BYTES;
        if rights.len() > most {
            return Err(error(format!("the description of the memory has {} bytes, expected {most}", rights.len())));
        }
        Ok(rights)
    }

    fn connect(&self, rights: &[u8]) -> Result<PathPeer, KvFabricError> {
        if rights.is_empty() {
            return Err(error("the peer did not describe its memory"));
        }
        let agent = self.agent();
        let mut name: *mut c_char = ptr::null_mut();
        // SAFETY: the bytes are there, and the result has a place.
        let status =
            unsafe { (self.api.load_remote_md)(agent.handle, rights.as_ptr().cast(), rights.len(), &mut name) };
        done("load_remote_md", status)?;
        if name.is_null() {
            return Err(error("load_remote_md: no name"));
        }
        // SAFETY: NIXL returned a text of `strdup`, which is freed once.
        let text = unsafe {
            let text = CStr::from_ptr(name).to_string_lossy().into_owned();
            libc::free(name.cast());
            text
        };
        Ok(PathPeer(text))
    }

    fn read(&self, peer: &PathPeer, parts: &[Part], stop: &Stop, moved: &dyn Fn(u64)) -> Result<(), KvFabricError> {
        let api = &self.api;
        let name = CString::new(peer.0.as_str()).map_err(|_| error("a peer's name with a zero"))?;
        let local = List::new(api, parts.iter().map(|part| (part.local, part.bytes)))?;
        let remote = List::new(api, parts.iter().map(|part| (part.remote, part.bytes)))?;
        let mut request = ptr::null_mut();
        let mut status = {
            let agent = self.agent();
            // SAFETY: agent, lists and name live; the local addresses are leased for writing until this returns.
            let status = unsafe {
                (api.create_xfer_req)(
                    agent.handle,
                    ffi::READ,
                    local.handle,
                    remote.handle,
                    name.as_ptr(),
                    &mut request,
                    agent.options,
                )
            };
            done("create_xfer_req", status)?;
            // SAFETY: agent and request live.
            unsafe { (api.post_xfer_req)(agent.handle, request, ptr::null_mut()) }
        };
        let mut look = LOOKS.0;
        while status == ffi::IN_PROGRESS && !stop.is_asked() {
            std::thread::sleep(look);
            look = LOOKS.1.min(look * 2);
            let agent = self.agent();
            // SAFETY: agent and request live.
            status = unsafe { (api.get_xfer_status)(agent.handle, request) };
        }
        // A request that runs is cancelled. Until that has succeeded, NIXL may write to the targets.
        loop {
            let agent = self.agent();
            // SAFETY: agent and request live.
            let (released, now) = unsafe {
                let released = (api.release_xfer_req)(agent.handle, request);
                (released, if released == ffi::SUCCESS { status } else { (api.get_xfer_status)(agent.handle, request) })
            };
            if released == ffi::SUCCESS || now != ffi::IN_PROGRESS {
                break;
            }
            drop(agent);
            std::thread::sleep(LOOKS.1);
        }
        // SAFETY: released above, and destroyed once.
        unsafe { (api.destroy_xfer_req)(request) };
        match status {
            ffi::SUCCESS => {
                moved(parts.iter().map(|part| u64::from(part.bytes)).sum());
                Ok(())
            }
            ffi::IN_PROGRESS => Err(KvFabricError::Cancelled),
            status => Err(error(format!("get_xfer_status: status {status}"))),
        }
    }

    fn disconnect(&self, peer: &PathPeer) {
        let Ok(name) = CString::new(peer.0.as_str()) else { return };
        let agent = self.agent();
        // SAFETY: the agent lives, and the text ends with a zero.
        unsafe { (self.api.invalidate_remote_md)(agent.handle, name.as_ptr()) };
    }
}
