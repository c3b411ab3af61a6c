import { Page } from "../components/Page";

export function Overview() {
  return <Page title="Overview">{null}</Page>;
}
