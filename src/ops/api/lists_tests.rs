//! Tests of totals and exports: both have exactly the payments of the list with the same filter.

use serde_json::{Value, json};

use super::tests::TestApi;
use crate::ops::tests::client;

#[tokio::test]
async fn totals_and_export_have_the_payments_of_the_list() {
    let stand = TestApi::new().await;
    for number in 0..1_003 {
        stand.add_job(&format!("p{number}"), "x", "waiting").await;
    }
    let (_, totals) = stand.get("/api/v1/job-totals?account=x").await;
    let sum = json!([{"currency": "EUR", "jobs": 1_003, "amount": 1_003 * 1_299}]);
    assert_eq!((&totals["jobs"], &totals["at_least"], &totals["currencies"]), (&1_003.into(), &false.into(), &sum));
    let export = async |query: &str| {
        let answer = client().get(format!("{}/api/v1/job-export?{query}", stand.address)).send().await.unwrap();
        let header = |name: &str| answer.headers().get(name).map(|text| text.to_str().unwrap().to_owned());
        (answer.status().as_u16(), header("content-type"), header("content-disposition"), answer.text().await.unwrap())
    };
    let (status, kind, file, text) = export("format=csv&account=x").await;
    assert_eq!((status, kind.as_deref()), (200, Some("text/csv; charset=utf-8; header=present")));
    assert_eq!(file.as_deref(), Some("attachment; filename=\"payments.csv\""));
    let lines: Vec<&str> = text.split_terminator("\r\n").collect();
    assert!(
        lines.len() == 1_004
            && lines[0].starts_with(r#""id","provider","state","amount","currency","account","reference","#)
    );
    assert!(lines[1].starts_with(r#""p1002","acme","waiting",12.99,"EUR","x","#), "{}", lines[1]);
    assert!(lines[1_003].starts_with("\"p0\","), "{}", lines[1_003]);
    let (status, _, _, text) = export("format=jsonl&search=p1002").await;
    let listed = stand.get("/api/v1/jobs?id=p1002").await.1["jobs"][0].clone();
    assert_eq!((status, serde_json::from_str::<Value>(&text).unwrap()), (200, listed));
    assert_eq!(export("search=p1002").await.3, text, "JSON lines are the default");
    let none = export("format=jsonl&account=none").await;
    assert_eq!((none.0, none.3.as_str()), (200, ""));
    for (query, words) in [("format=xml", "`format`: must be csv or jsonl"), ("formt=csv", "unknown field `formt`")] {
        let (status, _, _, text) = export(query).await;
        assert!(status == 400 && text.contains(words), "{query}: {status} {text}");
    }
}

#[tokio::test]
async fn every_filter_of_a_list_is_applied() {
    let stand = TestApi::new().await;
    for (id, state) in [("a", "dead"), ("b", "review"), ("c", "waiting")] {
        stand.add_job(id, "x", state).await;
    }
    stand.add_job("d", "y", "review").await;
    for (query, found) in [
        ("state=review,dead&account=x", vec!["b", "a"]),
        ("search=c", vec!["c"]),
        ("reason=so%20it&currency=EUR&min_amount=0.01&account=x", vec!["b", "a"]),
        ("currency=EUR&max_amount=12.98", vec![]),
        ("reason=limit", vec![]),
        ("created_to=2026-01-01", vec![]),
        ("finished_from=2026-01-01T00:00:00Z&account=x", vec!["b", "a"]),
    ] {
        let (status, page) = stand.get(&format!("/api/v1/jobs?{query}")).await;
        let ids: Vec<&str> = page["jobs"].as_array().unwrap().iter().map(|job| job["id"].as_str().unwrap()).collect();
        assert_eq!((status, ids, &page["next"]), (200, found, &Value::Null), "{query}");
    }
    for (query, words) in [
        ("min_amount=5", "`min_amount`: an amount needs its currency"),
        ("after=missing", "`after`: the ledger has no payment `missing`"),
    ] {
        let (status, answer) = stand.get(&format!("/api/v1/jobs?{query}")).await;
        assert!(status == 400 && answer["error"].as_str().unwrap().contains(words), "{query}: {status} {answer}");
    }
}

#[tokio::test]
async fn no_id_is_taken_for_a_list() {
    let stand = TestApi::new().await;
    for id in ["totals", "export", "job-totals", "explain"] {
        stand.add_job(id, "x", "waiting").await;
        let (status, found) = stand.get(&format!("/api/v1/jobs/{id}")).await;
        assert_eq!((status, &found["id"]), (200, &id.into()), "{found}");
    }
}
