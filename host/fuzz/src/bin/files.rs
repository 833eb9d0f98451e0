//! The fuzzer over `meridian_fuzz::files`; `scripts/fuzz.sh` builds and runs it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| meridian_fuzz::files::run(data));
