//! The kernels on CUDA devices: kernels/cuda/entropy.cu on a stream of its own beside the one that makes the logits.
#![expect(unsafe_code, reason = "calls of a driver")]

mod buffers;
mod device;
mod driver;
mod params;
mod ptx;

pub(crate) use device::{Device, Order, Pending};
