//! What the three slots have in common: columns that a policy names, and candidates seen through them.

/// An enum of columns in the order of its WIT enum, and `position_in`; called by a table of the contract.
macro_rules! column_enum {
    ($(#[$meta:meta])* $name:ident [$($variant:ident $method:ident $doc:literal;)*] $numbers:tt) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name {
            $(#[doc = $doc] $variant,)*
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

/// One candidate of a batch, seen through the columns its policy asked for: a struct over `rows`, and a method for each column
/// that is a number; called by a table of the contract.
macro_rules! candidate {
    (
        $(#[$meta:meta])* $name:ident in $batch:ident for $policy:ident by $column:ident
        $all:tt [$($variant:ident $method:ident $doc:literal;)*]
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

        /// The candidates of a batch.
        #[derive(Debug)]
        pub struct $batch<'a, P> {
            rows: &'a [&'a [f32]; $column::COUNT],
            candidates: usize,
            policy: core::marker::PhantomData<fn() -> P>,
        }

        impl<'a, P: $policy> $batch<'a, P> {
            #[inline(always)]
            pub(crate) fn new(rows: &'a [&'a [f32]; $column::COUNT], candidates: usize) -> Self {
                Self { rows, candidates, policy: core::marker::PhantomData }
            }

            /// The row of each column that the policy asked for. Without a loop, and each of a length that the compiler sees:
            /// then it checks no index of a loop over the candidates.
            ///
            /// # Panics
            /// When `columns` does not hold `INPUTS.len() * candidates` values.
            #[inline(always)]
            pub(crate) fn rows(candidates: usize, columns: &'a [f32]) -> [&'a [f32]; $column::COUNT] {
                assert!(columns.len() == P::INPUTS.len() * candidates, "columns do not match the policy's inputs");
                rows!(P, candidates, columns, $column $all)
            }

            /// How many candidates there are.
            #[inline(always)]
            #[must_use]
            pub fn len(&self) -> usize {
                self.candidates
            }

            /// Whether there is none.
            #[inline(always)]
            #[must_use]
            pub fn is_empty(&self) -> bool {
                self.candidates == 0
            }

            /// The candidate at `index`, which is below `len()`: beyond it every column panics.
            #[inline(always)]
            #[must_use]
            pub fn get(&self, index: usize) -> $name<'a, P> {
                $name::new(self.rows, index)
            }

            /// Every candidate, in the batch's order.
            #[inline(always)]
            pub fn iter(&self) -> impl ExactSizeIterator<Item = $name<'a, P>> + use<'a, P> {
                let rows = self.rows;
                (0..self.candidates).map(move |index| $name::new(rows, index))
            }
        }

        /// Where the row of a column is.
        const fn position<P: $policy>(column: $column) -> usize {
            assert!(column.position_in(P::INPUTS).is_some(), "the policy reads a column that its INPUTS do not name");
            column as usize
        }
    };
}

/// The row of each column, empty where the policy did not ask for it.
macro_rules! rows {
    ($policy:ident, $candidates:ident, $columns:ident, $column:ident [$($variant:ident $method:ident $doc:literal;)*]) => {
        [$(match const { $column::$variant.position_in($policy::INPUTS) } {
            Some(position) => &$columns[position * $candidates..][..$candidates],
            None => &[],
        },)*]
    };
}

/// A struct of facts, with the documentation of its WIT record; called by a table of the contract. `also` are fields that the
/// record does not have.
macro_rules! facts {
    (
        $(#[$meta:meta])* $name:ident { $($(#[$also_meta:meta])* $also:ident: $also_type:ty)? }
        [$($field:ident $type:ident $doc:literal;)*]
    ) => {
        $(#[$meta])*
        pub struct $name {
            $($(#[$also_meta])* pub $also: $also_type,)?
            $(#[doc = $doc] pub $field: $type,)*
        }
    };
}

pub(crate) use {candidate, column_enum, facts, rows};
