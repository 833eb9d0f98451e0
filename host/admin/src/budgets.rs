//! The routes of live thinking budgets: `GET` and `PUT /v1/budgets`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};

use super::audit::Event;
use super::routes::{MAX_DESCRIPTION, Recorded, Refusal, Shared, actor, authorize, blocking, json, read, receive_for};
use super::token::Role;
use meridian_engine::budgets::{ChangeError, LiveChange};

const NO_BUDGETS: &str = "this engine changes no budgets of live requests";

pub(super) async fn list(State(site): Shared) -> Response {
    read(&site, |site| match site.control.budgets() {
        Some(budgets) => {
            budgets.list().map_or_else(|error| refusal(&error).into_response(), |list| json(StatusCode::OK, &list))
        }
        None => Refusal::new(StatusCode::NOT_FOUND, NO_BUDGETS).into_response(),
    })
    .await
}

pub(super) async fn change(State(site): Shared, request: Request) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    authorize(&site, &head.headers, Role::Change)?;
    let text = receive_for(&site, body, MAX_DESCRIPTION).await?;
    let change =
        LiveChange::from_json(&text).map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, error.to_string()))?;
    let actor = actor(&head.extensions)?;
    let turn = Arc::clone(&site.changing).acquire_owned().await;
    let call = move || {
        let Some(budgets) = site.control.budgets() else {
            return Refusal::new(StatusCode::NOT_FOUND, NO_BUDGETS).into_response();
        };
        let asked = serde_json::to_string(&change).ok();
        let done = budgets.change(change);
        let (result, why) = match &done {
            Ok(report) => ("done", format!("{} requests changed", report.changed)),
            Err(error) => ("refused", error.to_string()),
        };
        site.record(&actor, &Event { action: "budgets", asked, result, why: Some(why), ..Event::default() });
        let mut response = match done {
            Ok(report) => json(StatusCode::OK, &report),
            Err(error) => refusal(&error).into_response(),
        };
        response.extensions_mut().insert(Recorded);
        (response, turn).0
    };
    Ok(blocking(call).await)
}

fn refusal(error: &ChangeError) -> Refusal {
    let code = match error {
        ChangeError::NoSuchRequest(_) => StatusCode::NOT_FOUND,
        ChangeError::NothingToChange(_) => StatusCode::CONFLICT,
        ChangeError::Busy(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    Refusal::new(code, error.to_string())
}
