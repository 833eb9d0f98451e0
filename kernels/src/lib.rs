//! Entropy of rows of logits: how sure a model is of its next token.
//!
//! For a row `x` of logits, with `m = max x`, one pass over the memory gives
//!
//! ```text
//! s = sum exp(x - m)        t = sum (x - m) exp(x - m)
//! H = -sum p ln p = ln s - t / s        p = softmax(x), H in nats
//! ```
//!
//! The formula is `ln p = (x - m) - ln s` put into Shannon's entropy. That one pass does, though `m` is not known
//! before, is the online softmax of Milakov and Gimelshein (arXiv 1805.02867, algorithm 3): when a larger maximum is
//! met, `s` and `t` are moved over to it. At a vocabulary of 151,936 the result is within 1e-5 nats of `f64`.
//!
//! A logit of `-inf` is a token that cannot come: it counts for nothing. A row that is no distribution (only `-inf`, or
//! with a NaN or `+inf` in it) has the entropy NaN.
//!
//! ```
//! use meridian_kernels::{Logits, Shape};
//!
//! // Two rows over four tokens: every token as likely as another; and the second token, surely.
//! let values = [0.5, 0.5, 0.5, 0.5, f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY, -200.0];
//! let logits = Logits::f32(&values, Shape::packed(2, 4))?;
//! let mut nats = [0.0; 2];
//! logits.entropy(&[0, 1], &mut nats)?;
//! assert!((nats[0] - 4f32.ln()).abs() < 1e-6);
//! assert!(nats[1] < 1e-6);
//! # Ok::<(), meridian_kernels::KernelError>(())
//! ```

mod cpu;
mod cuda;
mod error;
#[cfg(target_pointer_width = "64")]
mod ffi;
mod launch;
mod logits;
mod rows;

pub use cpu::Isa;
pub use error::{KernelError, Missing};
pub use launch::{Backend, MAX_ROWS, MAX_VOCAB, Matrix, Pending, Place, launch};
pub use logits::{Element, Logits, Shape};
pub use rows::{EatState, Probes, Request, RowStats, Tokens};
