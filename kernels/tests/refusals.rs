//! What the constructors and the call refuse, and what they say.
#![expect(unsafe_code, reason = "views from an address")]

use std::ffi::c_void;

use meridian_kernels::{Element, Isa, KernelError, Logits, Missing, Shape};

fn said(refused: Result<Logits<'_>, KernelError>) -> String {
    refused.expect_err("refused").to_string()
}

#[test]
fn shapes_that_are_none() {
    let values = [0.0; 10];
    let shape = |rows, vocab, row_stride| Logits::f32(&values, Shape { rows, vocab, row_stride });
    assert_eq!(said(shape(1, 0, 1)), "vocab: 0: expected at least 1");
    assert_eq!(said(shape(1, 5, 4)), "row_stride: 4: expected at least the vocabulary");
    assert_eq!(said(shape(2, 5, 6)), "logits: 10: expected at least (rows - 1) * row_stride + vocab");
    assert!(said(shape(usize::MAX, 5, 5)).starts_with("rows: "));
    assert!(shape(2, 4, 6).is_ok(), "the last row needs no gap after it");
    assert!(Logits::bf16(&[0; 9], Shape::packed(2, 5)).is_err());
    assert!(Logits::f16(&[], Shape::packed(0, 5)).is_ok());
}

#[test]
fn rows_that_are_not_there() {
    let values = [0.0; 10];
    let logits = Logits::f32(&values, Shape::packed(2, 5)).unwrap();
    let mut nats = [7.0; 2];
    let refused = logits.entropy(&[0, 2], &mut nats);
    assert_eq!(refused, Err(KernelError::RowOutOfRange { row: 2, rows: 2 }));
    assert_eq!(refused.unwrap_err().to_string(), "rows: 2: expected less than 2");
    assert_eq!(nats, [7.0; 2], "nothing was written");
    let refused = logits.entropy(&[0], &mut nats).unwrap_err();
    assert_eq!(refused.to_string(), "out: 2: expected one value a row asked for");
    logits.entropy(&[], &mut []).unwrap();
    Logits::f32(&[], Shape::packed(0, 5)).unwrap().entropy(&[], &mut []).unwrap();
}

#[test]
fn instructions_that_are_not_there() {
    let values = [0.0; 5];
    let logits = Logits::f32(&values, Shape::packed(1, 5)).unwrap();
    let available: Vec<Isa> = Isa::available().collect();
    assert!(available.contains(&Isa::Portable) && available.contains(&Isa::best()));
    for isa in [Isa::Portable, Isa::Avx2, Isa::Avx512] {
        let ran = logits.entropy_with(isa, &[0], &mut [0.0]);
        assert_eq!(
            ran,
            if available.contains(&isa) { Ok(()) } else { Err(KernelError::Unavailable(Missing::Instructions)) }
        );
    }
}

#[test]
fn addresses() {
    let values: Vec<f32> = (0..300).map(|i| (i % 17) as f32 / 3.0).collect();
    let shape = Shape { rows: 3, vocab: 90, row_stride: 100 };
    // SAFETY: null is refused before it is read.
    let refused = unsafe { Logits::from_raw(std::ptr::null(), Element::F32, shape) };
    assert_eq!(refused.unwrap_err(), KernelError::NullPointer("logits"));
    assert_eq!(KernelError::NullPointer("logits").to_string(), "logits: null pointer");

    let pointer: *const c_void = values.as_ptr().cast();
    // SAFETY: an address between two logits is refused before it is read.
    let refused = unsafe { Logits::from_raw(pointer.wrapping_byte_add(2), Element::F32, shape) };
    assert!(said(refused).ends_with("expected an address that is a multiple of the size of a logit"));
    // SAFETY: more than an address space holds is refused before it is read.
    let refused = unsafe { Logits::from_raw(pointer, Element::F32, Shape::packed(1, usize::MAX / 3)) };
    assert!(refused.is_err());

    // SAFETY: 290 logits of the vector above, which nobody writes to.
    let raw = unsafe { Logits::from_raw(pointer, Element::F32, shape) }.unwrap();
    assert_eq!((raw.element(), raw.shape()), (Element::F32, shape));
    let mut nats = [[0.0; 3]; 2];
    raw.entropy(&[2, 1, 0], &mut nats[0]).unwrap();
    Logits::f32(&values, shape).unwrap().entropy(&[2, 1, 0], &mut nats[1]).unwrap();
    assert_eq!(nats[0], nats[1]);
}
