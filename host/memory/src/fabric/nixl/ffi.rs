//! NIXL's C interface, found in its library at run time. Signatures: `wrapper.h` of NIXL's Rust binding, 1.5.
#![expect(unsafe_code, reason = "calls into a C library")]

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;

use libloading::Library;

pub(super) type Handle = *mut c_void;

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 1;
pub(super) const DRAM: c_int = 0;
pub(super) const READ: c_int = 0;

/// How an agent is made, `nixl_capi_agent_config_t`. NIXL 1.5 has a port, a kind of lock and a number of workers in the bytes
/// that are zero here; later versions order these otherwise. Zero means none of them.
#[repr(C)]
pub(super) struct AgentConfig {
    pub(super) has_progress_thread: bool,
    pub(super) has_listener: bool,
    pub(super) zero: [u8; 14],
    /// How long the progress thread waits for an event, microseconds.
    pub(super) progress_us: u64,
    pub(super) listener_us: u64,
    pub(super) has_telemetry: bool,
}

macro_rules! api {
    ($($name:ident($($type:ty),*);)*) => {
        /// The functions that this crate uses. The library stays loaded: its threads outlive every agent.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
        }

        impl Api {
            /// Look the functions up in a library.
            ///
            /// # Errors
            /// The loader's message.
            pub(super) fn load(path: &Path) -> Result<Self, String> {
                // SAFETY: the operator names the library; its initializers are NIXL's.
                let library = unsafe { Library::new(path) }.map_err(|error| {
                    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                    format!("{error}{}", cause.unwrap_or_default())
                })?;
                // Never unloaded: see above.
                let library: &'static Library = Box::leak(Box::new(library));
                Ok(Self {
                    $($name: {
                        let symbol = concat!("nixl_capi_", stringify!($name));
                        // SAFETY: the type is that of NIXL's header.
                        let found = unsafe { library.get(symbol) };
                        *found.map_err(|_| format!("it has no function {symbol}"))?
                    },)*
                })
            }
        }
    };
}

api! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut Handle);
    destroy_agent(Handle);
    get_local_md(Handle, *mut *mut c_void, *mut usize);
    load_remote_md(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(Handle, *const c_char);
    get_plugin_params(Handle, *const c_char, *mut Handle, *mut Handle);
    create_backend(Handle, *const c_char, Handle, *mut Handle);
    destroy_backend(Handle);
    destroy_mem_list(Handle);
    destroy_params(Handle);
    create_opt_args(*mut Handle);
    destroy_opt_args(Handle);
    opt_args_add_backend(Handle, Handle);
    create_reg_dlist(c_int, *mut Handle, bool);
    destroy_reg_dlist(Handle);
    reg_dlist_add_desc(Handle, usize, usize, u64, *const c_void, usize);
    register_mem(Handle, Handle, Handle);
    create_xfer_dlist(c_int, *mut Handle, bool);
    destroy_xfer_dlist(Handle);
    xfer_dlist_add_desc(Handle, usize, usize, u64);
    create_xfer_req(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req(Handle, Handle, Handle);
    get_xfer_status(Handle, Handle);
    release_xfer_req(Handle, Handle);
    destroy_xfer_req(Handle);
}
