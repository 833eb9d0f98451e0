/// Values read from a fuzzer's input; zeros after its end.
pub(crate) struct Bytes<'a> {
    left: &'a [u8],
}

impl<'a> Bytes<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Self {
        Self { left: data }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// Of any bits, NaN included.
    pub(crate) fn f64(&mut self) -> f64 {
        f64::from_bits(self.u64())
    }

    /// Of any bits, NaN included.
    pub(crate) fn f32(&mut self) -> f32 {
        f32::from_bits(self.u32())
    }

    /// Below `end`; 0 when that is 0.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::from(self.u16()) % end.max(1)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (now, left) = self.left.split_at(N.min(self.left.len()));
        self.left = left;
        let mut array = [0; N];
        array[..now.len()].copy_from_slice(now);
        array
    }
}
