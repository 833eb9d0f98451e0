//! A borrowed matrix of logits, and what can be asked of it.
#![expect(unsafe_code, reason = "a view of memory that another runtime owns begins with its address")]

use std::ffi::c_void;
use std::slice;

use crate::cpu::{Bf16, F16, F32, Isa, Kind, Path};
use crate::launch::check_request;
use crate::{KernelError, Place, Request, RowStats, Tokens};

/// What one logit is in memory, in the machine's byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// IEEE 754 single precision.
    F32,
    /// The upper 16 bits of an `f32`.
    Bf16,
    /// IEEE 754 half precision.
    F16,
}

impl Element {
    /// Bytes of one logit.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// Size of a matrix of logits, in logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows, one a position whose next token the model rated.
    pub rows: usize,
    /// Logits in a row; at least 1.
    pub vocab: usize,
    /// From the first logit of a row to the first of the next; at least `vocab`.
    pub row_stride: usize,
}

impl Shape {
    /// Rows one after the other, with nothing between them.
    #[must_use]
    pub fn packed(rows: usize, vocab: usize) -> Self {
        Self { rows, vocab, row_stride: vocab }
    }

    /// That it is one, and fits into the address space.
    pub(crate) fn check(&self, element: Element) -> Result<(), KernelError> {
        if self.span()? > isize::MAX as usize / element.bytes() {
            let expected = "a matrix that fits into the address space";
            return Err(KernelError::BadShape { field: "rows", value: self.rows, expected });
        }
        Ok(())
    }

    /// Logits from the first to the last one, both included.
    fn span(&self) -> Result<usize, KernelError> {
        if self.vocab == 0 {
            return Err(KernelError::BadShape { field: "vocab", value: 0, expected: "at least 1" });
        }
        if self.row_stride < self.vocab {
            return Err(KernelError::BadShape {
                field: "row_stride",
                value: self.row_stride,
                expected: "at least the vocabulary",
            });
        }
        let Some(last) = self.rows.checked_sub(1) else { return Ok(0) };
        last.checked_mul(self.row_stride).and_then(|start| start.checked_add(self.vocab)).ok_or(KernelError::BadShape {
            field: "rows",
            value: self.rows,
            expected: "a matrix that fits into the address space",
        })
    }
}

/// A view of logits: rows by vocabulary, in memory that somebody else owns.
///
/// See the [crate] for an example.
#[derive(Debug, Clone, Copy)]
pub struct Logits<'a> {
    values: Values<'a>,
    shape: Shape,
}

#[derive(Debug, Clone, Copy)]
enum Values<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
    F16(&'a [u16]),
}

impl<'a> Logits<'a> {
    /// Single precision.
    ///
    /// # Errors
    ///
    /// [`KernelError::BadShape`] when the shape is none, or needs more logits than there are.
    pub fn f32(values: &'a [f32], shape: Shape) -> Result<Self, KernelError> {
        check_len(values.len(), &shape)?;
        Ok(Self { values: Values::F32(values), shape })
    }

    /// `bfloat16`, as its bits.
    ///
    /// # Errors
    ///
    /// As [`Logits::f32`].
    pub fn bf16(values: &'a [u16], shape: Shape) -> Result<Self, KernelError> {
        check_len(values.len(), &shape)?;
        Ok(Self { values: Values::Bf16(values), shape })
    }

    /// Half precision, as its bits.
    ///
    /// # Errors
    ///
    /// As [`Logits::f32`].
    pub fn f16(values: &'a [u16], shape: Shape) -> Result<Self, KernelError> {
        check_len(values.len(), &shape)?;
        Ok(Self { values: Values::F16(values), shape })
    }

    /// Logits at an address, for example of a tensor of another runtime.
    ///
    /// # Safety
    ///
    /// From `logits` on, `(rows - 1) * row_stride + vocab` logits must be readable memory of one allocation,
    /// initialized, and nobody may write to them during `'a`.
    ///
    /// # Errors
    ///
    /// [`KernelError::NullPointer`] with the name `logits`. [`KernelError::BadShape`] when the shape is none, or the
    /// address is not a multiple of the size of a logit.
    pub unsafe fn from_raw(logits: *const c_void, element: Element, shape: Shape) -> Result<Self, KernelError> {
        if logits.is_null() {
            return Err(KernelError::NullPointer("logits"));
        }
        shape.check(element)?;
        let span = shape.span()?;
        let address = logits.addr();
        if !address.is_multiple_of(element.bytes()) {
            let expected = "an address that is a multiple of the size of a logit";
            return Err(KernelError::BadShape { field: "logits", value: address, expected });
        }
        // SAFETY: not null and aligned, checked above; `span` logits are readable, initialized and left alone for 'a by
        // this function's contract, and at most isize::MAX bytes long. Any bits are an f32, or a u16.
        let values = unsafe {
            match element {
                Element::F32 => Values::F32(slice::from_raw_parts(logits.cast(), span)),
                Element::Bf16 => Values::Bf16(slice::from_raw_parts(logits.cast(), span)),
                Element::F16 => Values::F16(slice::from_raw_parts(logits.cast(), span)),
            }
        };
        Ok(Self { values, shape })
    }

    /// The size that was given.
    #[must_use]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Kind of the logits.
    #[must_use]
    pub fn element(&self) -> Element {
        match self.values {
            Values::F32(_) => Element::F32,
            Values::Bf16(_) => Element::Bf16,
            Values::F16(_) => Element::F16,
        }
    }

    /// Entropy in nats of each of `rows`, in their order, into `out`, with the fastest instructions of this machine.
    /// On the caller's thread; NaN for a row that is no distribution.
    ///
    /// # Errors
    ///
    /// [`KernelError::RowOutOfRange`], and [`KernelError::BadShape`] when `out` is not as long as `rows`.
    pub fn entropy(&self, rows: &[u32], out: &mut [f32]) -> Result<(), KernelError> {
        self.entropy_with(Isa::best(), rows, out)
    }

    /// [`Logits::entropy`] with instructions of the caller's choice, for comparisons.
    ///
    /// # Errors
    ///
    /// As [`Logits::entropy`]; [`KernelError::Unavailable`] when this machine does not have them.
    pub fn entropy_with(&self, isa: Isa, rows: &[u32], out: &mut [f32]) -> Result<(), KernelError> {
        check_out(out.len(), rows.len())?;
        if let Some(&row) = rows.iter().find(|&&row| row as usize >= self.shape.rows) {
            return Err(KernelError::RowOutOfRange { row, rows: self.shape.rows });
        }
        let path = Path::new(isa)?;
        match self.values {
            Values::F32(values) => self.each::<F32>(path, values, rows, out),
            Values::Bf16(values) => self.each::<Bf16>(path, values, rows, out),
            Values::F16(values) => self.each::<F16>(path, values, rows, out),
        }
        Ok(())
    }

    /// All that [`RowStats`] holds but the state of EAT, of each row of `request`, into `out`, with the fastest
    /// instructions of this machine. On the caller's thread; [`RowStats::NONE`] for a row that is no distribution.
    ///
    /// # Errors
    ///
    /// [`KernelError::RowOutOfRange`]; [`KernelError::BadShape`] when `out` or a list of the request is not as long as
    /// the rows, or the matrix is larger than [`MAX_ROWS`](crate::MAX_ROWS) and [`MAX_VOCAB`](crate::MAX_VOCAB) allow; [`KernelError::BadValue`] for a temperature that
    /// is none, and for tokens on a device.
    pub fn measure(&self, request: &Request<'_>, out: &mut [RowStats]) -> Result<(), KernelError> {
        self.measure_with(Isa::best(), request, out)
    }

    /// [`Logits::measure`] with instructions of the caller's choice, for comparisons.
    ///
    /// # Errors
    ///
    /// As [`Logits::measure`]; [`KernelError::Unavailable`] when this machine does not have them.
    pub fn measure_with(&self, isa: Isa, request: &Request<'_>, out: &mut [RowStats]) -> Result<(), KernelError> {
        let count = check_request(&self.shape, request, &Place::Cpu)?;
        check_out(out.len(), count)?;
        let path = Path::new(isa)?;
        match self.values {
            Values::F32(values) => self.stats::<F32>(path, values, request, out),
            Values::Bf16(values) => self.stats::<Bf16>(path, values, request, out),
            Values::F16(values) => self.stats::<F16>(path, values, request, out),
        }
        Ok(())
    }

    fn each<K: Kind>(&self, path: Path, values: &'a [K::Raw], rows: &[u32], out: &mut [f32]) {
        for (&row, out) in rows.iter().zip(out) {
            *out = path.sums::<K>(self.row::<K>(values, row as usize), 1.0).map_or(f32::NAN, |sums| sums.nats());
        }
    }

    fn stats<K: Kind>(&self, path: Path, values: &'a [K::Raw], request: &Request<'_>, out: &mut [RowStats]) {
        let tokens = if let Tokens::Host(tokens) = request.tokens { tokens } else { &[] };
        for (i, out) in out.iter_mut().enumerate() {
            let row = self.row::<K>(values, request.rows.map_or(i, |rows| rows[i] as usize));
            let token = tokens.get(i).and_then(|token| usize::try_from(*token).ok());
            let temperature = request.temperatures.get(i).copied().unwrap_or(1.0);
            *out = path.sums::<K>(row, temperature).map_or(RowStats::NONE, |sums| sums.stats::<K>(row, token));
        }
    }

    fn row<K: Kind>(&self, values: &'a [K::Raw], row: usize) -> &'a [K::Raw] {
        // The constructors checked that the last row ends within `values`.
        &values[row * self.shape.row_stride..][..self.shape.vocab]
    }
}

fn check_out(len: usize, rows: usize) -> Result<(), KernelError> {
    let expected = "one value a row asked for";
    if len == rows { Ok(()) } else { Err(KernelError::BadShape { field: "out", value: len, expected }) }
}

fn check_len(len: usize, shape: &Shape) -> Result<(), KernelError> {
    if len < shape.span()? {
        let expected = "at least (rows - 1) * row_stride + vocab";
        return Err(KernelError::BadShape { field: "logits", value: len, expected });
    }
    Ok(())
}
