//! What the three slots have in common: columns that a policy names, and candidates seen through them.

/// An enum of columns in the order of its WIT enum, and `position_in`.
macro_rules! column_enum {
    ($(#[$meta:meta])* $name:ident { $($variant:ident),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[allow(missing_docs)] // documented in wit/, the one place
        pub enum $name {
            $($variant,)*
        }

        impl $name {
            /// Every column, in the order of the WIT enum.
            pub const ALL: [Self; [$(Self::$variant),*].len()] = [$(Self::$variant),*];

            /// How many columns there are.
            pub const COUNT: usize = Self::ALL.len();

            /// Where `self` stands in `inputs`, if it does.
            #[must_use]
            pub const fn position_in(self, inputs: &[Self]) -> Option<usize> {
                let mut i = 0;
                while i < inputs.len() {
                    if inputs[i] as u8 == self as u8 {
                        return Some(i);
                    }
                    i += 1;
                }
                None
            }
        }
    };
}

/// One candidate of a batch, seen through the columns its policy asked for: a struct over `rows`, and a method a column.
macro_rules! candidate {
    (
        $(#[$meta:meta])* $name:ident for $policy:ident by $column:ident;
        $($method:ident $variant:ident $doc:literal;)*
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub struct $name<'a, P> {
            rows: &'a [&'a [f32]; $column::COUNT],
            index: usize,
            policy: core::marker::PhantomData<fn() -> P>,
        }

        impl<'a, P: $policy> $name<'a, P> {
            #[inline(always)]
            pub(crate) fn new(rows: &'a [&'a [f32]; $column::COUNT], index: usize) -> Self {
                Self { rows, index, policy: core::marker::PhantomData }
            }

            $(
                #[doc = $doc]
                #[inline(always)]
                #[must_use]
                pub fn $method(&self) -> f32 {
                    self.rows[const { position::<P>($column::$variant) }][self.index]
                }
            )*
        }

        const fn position<P: $policy>(column: $column) -> usize {
            match column.position_in(P::INPUTS) {
                Some(position) => position,
                None => panic!("the policy reads a column that its INPUTS do not name"),
            }
        }
    };
}

pub(crate) use {candidate, column_enum};

/// The rows of a matrix of `inputs` columns and `candidates` values each.
///
/// # Panics
/// When `columns` does not hold as many values.
#[inline]
pub(crate) fn rows<const COUNT: usize>(inputs: usize, candidates: usize, columns: &[f32]) -> [&[f32]; COUNT] {
    assert!(columns.len() == inputs * candidates, "columns do not match the policy's inputs");
    let mut rows: [&[f32]; COUNT] = [&[]; COUNT];
    for (position, row) in rows.iter_mut().enumerate().take(inputs) {
        *row = &columns[position * candidates..(position + 1) * candidates];
    }
    rows
}
