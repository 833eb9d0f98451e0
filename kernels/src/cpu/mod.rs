//! Rows on the CPU: which instructions this machine has, and the loop over them.

mod portable;
mod row;
mod simd;
mod sums;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use simd::{Bf16, F16, F32, Kind};
pub(crate) use sums::Sums;

use crate::{KernelError, Missing};

const MISSING: KernelError = KernelError::Unavailable(Missing::Instructions);

/// A set of instructions that the kernel is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// What the compiler makes for the target; on aarch64 that is NEON.
    Portable,
    /// x86-64 with AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// x86-64 with AVX-512 F: 16 lanes.
    Avx512,
}

impl Isa {
    const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The fastest that this machine has. The machine is asked once in a process.
    #[must_use]
    pub fn best() -> Self {
        Self::available().last().unwrap_or(Self::Portable)
    }

    /// All that this machine has, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    fn is_available(self) -> bool {
        Path::new(self).is_ok()
    }
}

/// A set of instructions that this machine has.
#[derive(Clone, Copy)]
pub(crate) enum Path {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2(x86::Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(x86::Avx512),
}

impl Path {
    pub(crate) fn new(isa: Isa) -> Result<Self, KernelError> {
        match isa {
            Isa::Portable => Ok(Self::Portable),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => x86::Avx2::detect().map(Self::Avx2).ok_or(MISSING),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => x86::Avx512::detect().map(Self::Avx512).ok_or(MISSING),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 | Isa::Avx512 => Err(MISSING),
        }
    }

    /// The sums of one row; none when it is no distribution. The temperature is finite and above 0.
    pub(crate) fn sums<K: Kind>(self, row: &[K::Raw], temperature: f32) -> Option<Sums> {
        if !sums::TAME.contains(&temperature) {
            return Sums::plain::<K>(row, temperature);
        }
        match self {
            Self::Portable => portable::sums::<K>(row, temperature),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.sums::<K>(row, temperature),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.sums::<K>(row, temperature),
        }
    }
}
