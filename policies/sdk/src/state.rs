use std::collections::BTreeMap;

/// The state that a policy keeps of each request, by the column `request`.
///
/// ```
/// use meridian_policy_sdk::{ByRequest, Column, DispatchPolicy, Init, Policy, Request, Requests, Step};
///
/// /// Who was looked at most often goes last.
/// #[derive(Default)]
/// struct Patient {
///     steps: ByRequest<u32>,
/// }
///
/// impl Policy for Patient {
///     const NAME: &'static str = "patient";
///     const VERSION: &'static str = "0.1.0";
///     const SUMMARY: &'static str = "Who was looked at most often goes last.";
///
///     fn new(init: Init<'_>) -> Result<Self, String> {
///         init.no_config().map(|()| Self::default())
///     }
///
///     fn finished(&mut self, requests: &[u32]) {
///         self.steps.forget(requests);
///     }
/// }
///
/// impl DispatchPolicy for Patient {
///     const INPUTS: &'static [Column] = &[Column::Request];
///
///     fn observe(&mut self, _step: &Step, batch: &Requests<'_, Self>) {
///         for request in batch.iter() {
///             *self.steps.of_mut(request.request()) += 1;
///         }
///     }
///
///     fn key(&self, _step: &Step, request: &Request<'_, Self>) -> f32 {
///         self.steps.of(request.request()).copied().unwrap_or(0) as f32
///     }
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct ByRequest<T> {
    states: BTreeMap<u32, T>,
}

impl<T: Default> ByRequest<T> {
    /// The state of a request, if it has one.
    #[must_use]
    pub fn of(&self, request: f32) -> Option<&T> {
        self.states.get(&(request as u32))
    }

    /// The state of a request; a new one has the default.
    pub fn of_mut(&mut self, request: f32) -> &mut T {
        self.states.entry(request as u32).or_default()
    }

    /// Forget requests that have ended.
    pub fn forget(&mut self, requests: &[u32]) {
        for request in requests {
            self.states.remove(request);
        }
    }

    /// How many requests have a state.
    #[must_use]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether none has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::ByRequest;

    #[test]
    fn state_of_requests_that_ended_goes() {
        let mut steps = ByRequest::<u32>::default();
        for request in [1.0, 2.0, 2.0, 16_777_215.0] {
            *steps.of_mut(request) += 1;
        }
        steps.forget(&[1, 16_777_215, 9]);
        assert_eq!((steps.len(), steps.is_empty()), (1, false));
        assert_eq!([1.0, 2.0].map(|request| steps.of(request).copied()), [None, Some(2)]);
    }
}
