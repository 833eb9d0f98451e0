//! Numbers for policies: of requests, and for the names of tenants that clients give. All memory is bounded, because names
//! come from outside.

use std::collections::HashMap;
use std::sync::Arc;

/// Number of remembered tenant names; a further name counts as none. With the length of a name, it bounds the memory
/// that clients can make the host use.
const MAX_TENANTS: usize = 1 << 16;
/// Longest name, characters.
const MAX_NAME_CHARS: usize = 128;
/// Largest number that an `f32` column holds exactly, with all below it.
const MAX_NUMBER: u32 = (1 << 24) - 1;

/// The number after this one, from 1 to [`MAX_NUMBER`].
pub(crate) fn next_number(number: u32) -> u32 {
    if number >= MAX_NUMBER { 1 } else { number + 1 }
}

#[derive(Debug, Default)]
pub(crate) struct Clients {
    tenants: HashMap<Arc<str>, u32>,
    /// By their numbers, from 1.
    names: Vec<Arc<str>>,
}

impl Clients {
    /// The number of a tenant, in order of first appearance; 0 for none.
    pub(crate) fn tenant(&mut self, name: &str) -> u32 {
        if !is_name(name) {
            return 0;
        }
        if let Some(tenant) = self.tenants.get(name) {
            return *tenant;
        }
        if self.tenants.len() >= MAX_TENANTS {
            return 0;
        }
        let tenant = u32::try_from(self.tenants.len() + 1).expect("MAX_TENANTS fits");
        let name: Arc<str> = name.into();
        self.names.push(Arc::clone(&name));
        self.tenants.insert(name, tenant);
        tenant
    }

    /// The number of a tenant that has appeared.
    pub(crate) fn number(&self, name: &str) -> Option<u32> {
        self.tenants.get(name).copied()
    }

    /// The name of a tenant by its number; empty for none.
    pub(crate) fn name(&self, tenant: u32) -> &str {
        let index = usize::try_from(tenant).ok().and_then(|number| number.checked_sub(1));
        index.and_then(|index| self.names.get(index)).map_or("", |name| name)
    }
}

pub(crate) fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().nth(MAX_NAME_CHARS).is_none()
}

/// Number of ended requests that are remembered for those who are told later.
const MAX_ENDED: usize = 1 << 16;

/// Numbers of ended requests, for readers with cursors of their own.
#[derive(Debug, Default)]
pub(crate) struct Ended {
    numbers: Vec<u32>,
    /// Ended requests that are forgotten.
    before: u64,
}

impl Ended {
    pub(crate) fn push(&mut self, number: u32) {
        if self.numbers.len() >= 2 * MAX_ENDED {
            self.numbers.drain(..MAX_ENDED);
            self.before += MAX_ENDED as u64;
        }
        self.numbers.push(number);
    }

    /// Those since the cursor, which moves to the end.
    pub(crate) fn since(&self, cursor: &mut u64) -> &[u32] {
        let from = usize::try_from(cursor.saturating_sub(self.before)).unwrap_or(usize::MAX);
        *cursor = self.before + self.numbers.len() as u64;
        self.numbers.get(from..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_requests_are_told_once_to_each() {
        let (mut ended, mut one, mut other) = (Ended::default(), 0, 0);
        ended.push(7);
        ended.push(8);
        assert_eq!(ended.since(&mut one), [7, 8]);
        ended.push(9);
        assert_eq!((ended.since(&mut one), ended.since(&mut other)), (&[9][..], &[7, 8, 9][..]));
        assert!(ended.since(&mut one).is_empty());
        for number in 0..3 * MAX_ENDED as u32 {
            ended.push(number);
        }
        assert!(ended.numbers.len() <= 2 * MAX_ENDED);
        let since = ended.since(&mut one);
        assert!(since.len() >= MAX_ENDED && since.last() == Some(&(3 * MAX_ENDED as u32 - 1)), "the last are there");
        assert!(ended.since(&mut one).is_empty());
    }

    #[test]
    fn numbers_begin_again_after_the_last_exact_one() {
        assert_eq!((next_number(0), next_number(MAX_NUMBER)), (1, 1));
        assert_eq!(MAX_NUMBER as f32 as u32, MAX_NUMBER);
    }
}
