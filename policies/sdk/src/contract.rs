//! The tables of the contract, made from `wit/` by `build.rs`.

include!(concat!(env!("OUT_DIR"), "/contract.rs"));
