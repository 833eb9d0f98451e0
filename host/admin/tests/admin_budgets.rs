//! `/v1/budgets` of the admin listener, over real sockets.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[expect(dead_code, reason = "shared with other tests")]
mod support;

use meridian_engine::budgets::{BudgetList, ChangeReport};

use support::{TOKEN, live, start};

#[test]
fn budgets_are_listed_without_a_token_and_changed_with_one() {
    let process = start("budgets");
    let list: BudgetList = serde_json::from_str(&process.get("/v1/budgets").body).unwrap();
    assert_eq!(list.requests, [live()]);
    let body = br#"{"tenant":"batch","max_think_tokens":512}"#;
    assert_eq!(process.ask("PUT /v1/budgets", "", body).code, 401);
    assert!(process.recorder.calls().is_empty());
    let reply = process.change("PUT /v1/budgets", body);
    assert_eq!(reply.code, 200, "{}", reply.body);
    let report: ChangeReport = serde_json::from_str(&reply.body).unwrap();
    assert_eq!((report.changed, report.answering, report.requests.as_slice()), (1, 2, &[live()][..]));
    assert_eq!(process.recorder.calls(), [r#"{"tenant":"batch","max_think_tokens":512}"#]);
}

#[test]
fn what_cannot_be_changed_is_refused_in_one_line() {
    let process = start("budgets-refused");
    let token = format!("Authorization: Bearer {TOKEN}\r\n");
    for (body, code, why) in [
        (r#"{"request":"absent","reset":true}"#, 404, "absent: no live request has this id"),
        (r#"{"request":"over","reset":true}"#, 409, "over: 1 answer already"),
        (r#"{"request":"late","reset":true}"#, 503, "16 changes wait"),
        (r#"{"all":true,"ema_alpha":2}"#, 400, "ema_alpha: 2: must be in (0, 1]"),
        ("", 400, "the body: "),
    ] {
        let reply = process.ask("PUT /v1/budgets", &token, body.as_bytes());
        assert_eq!(reply.code, code, "{}", reply.body);
        let text: serde_json::Value = serde_json::from_str(&reply.body).unwrap();
        assert!(text["error"].as_str().unwrap().starts_with(why), "{text}");
    }
    assert_eq!(process.change("DELETE /v1/budgets", b"").code, 405);
}
