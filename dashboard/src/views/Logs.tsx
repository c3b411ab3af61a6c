import { Page } from "../components/Page";

export function Logs() {
  return <Page title="Logs">{null}</Page>;
}
